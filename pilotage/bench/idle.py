"""Waiting until the arms that have had their turn leave the processor alone.

A server goes on for a while after its last answer: threads spin, pages are written, memory is given back. The next arm
would pay for it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from pilotage.bench.memory import tree

IDLE = 0.05
WINDOW_S = 0.1
PATIENCE_S = 10.0
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(root: int) -> float:
    """Return the processor time that a process and its descendants have used; 0 where the system does not tell."""
    total = 0
    for pid in tree(root):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def wait(roots: Iterable[int], *, patience_s: float = PATIENCE_S) -> float | None:
    """Wait until process trees together use less than a twentieth of one core.

    Args:
        roots: process ids.
        patience_s: give up after this long.

    Returns:
        The seconds waited, or None when they were still busy at the end.
    """
    pids = list(roots)
    start = time.monotonic()
    used = sum(map(cpu_seconds, pids))
    while True:
        time.sleep(WINDOW_S)
        now = sum(map(cpu_seconds, pids))
        if now - used <= IDLE * WINDOW_S:
            return time.monotonic() - start
        if time.monotonic() - start > patience_s:
            return None
        used = now
