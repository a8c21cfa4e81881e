"""How much memory this process may still use, container limits included."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_ENV = "PILOTAGE_MEMORY_BYTES"


def free_bytes(cgroup: Path = _CGROUP) -> int:
    """Return the bytes that are free on this machine, in this container, and under `PILOTAGE_MEMORY_BYTES`.

    The environment variable bounds what all pilotage processes on the machine may use together.
    """
    import psutil

    free = psutil.virtual_memory().available
    limit, used = _read(cgroup / "memory.max"), _read(cgroup / "memory.current")
    if limit is not None and used is not None:
        # The page cache counts as used but is given back on demand.
        free = min(free, max(limit - used + (_stat(cgroup / "memory.stat", "file") or 0), 0))
    stated = os.environ.get(_ENV)
    if stated:
        free = min(free, max(int(stated) - psutil.Process().memory_info().rss, 0))
    return free


def _read(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" means no limit


def _stat(path: Path, key: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[0] == key), None)
