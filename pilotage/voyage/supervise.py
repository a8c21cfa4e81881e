"""Run one command so that nothing of it outlives the voyage: `python -m pilotage.voyage.supervise PARENT -- COMMAND`.

A stage starts an engine, and an engine starts processes of its own. This small process stands between: when the
voyage dies, by kill -9 too, or asks it to stop, it ends everything that the command has started. Linux only in that
part; elsewhere the command is ended on request, but not when the voyage is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

GRACE_S = 5.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class _Stop(Exception):
    """We were asked to stop."""


def _raise_stop(signum: int, frame: FrameType | None) -> None:
    raise _Stop


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Process ids of everything below `root`, found in /proc; empty where there is none."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name in parentheses may hold anything; what follows the last one is fixed.
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    found, frontier = [], {root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        found += sorted(frontier)
    return found


def _end_all(root: int) -> None:
    """Ask everything below `root` to end, and kill what has not after `GRACE_S`."""
    for signum, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 2.0)):
        alive = descendants(root)
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signum)
        deadline = time.monotonic() + patience
        while alive and time.monotonic() < deadline:
            # As subreaper we inherit the orphans, and have to collect them.
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            alive = descendants(root)
            time.sleep(0.05)


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code; 128 + n when signal n ended it, 143 when we were told to stop."""
    parent, separator, *command = arguments
    if separator != "--" or not command:
        raise SystemExit("usage: supervise PARENT -- COMMAND")
    try:
        signal.signal(signal.SIGTERM, _raise_stop)
        signal.signal(signal.SIGINT, _raise_stop)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):  # it died before we had asked to be told
            return 143
        code = subprocess.Popen(command, stdin=subprocess.DEVNULL).wait()
    except _Stop:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _end_all(os.getpid())
        return 143
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_all(os.getpid())
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
