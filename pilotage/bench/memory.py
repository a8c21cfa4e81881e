"""Peak memory of a process and everything below it, as the kernel kept count."""

from __future__ import annotations

import contextlib
from pathlib import Path


def tree(root: int) -> list[int]:
    """Return `root` and all its descendants."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name in parentheses may hold anything; what follows the last one is fixed.
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    found, frontier = [], {root}
    while frontier:
        found += sorted(frontier)
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
    return found


def peak_rss_mib(root: int) -> float | None:
    """Sum the largest resident sizes of a process tree; None where the system does not keep them.

    Each process counts with its own peak and with the pages that it shares, so this is an upper bound.
    """
    total = 0
    for pid in tree(root):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1])
    return total / 1024 if total else None
