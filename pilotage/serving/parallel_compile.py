"""Compile several graphs at once, in forked copies of this process.

Most of the time of a compilation is one Python thread of torch's compiler, so a second core halves the wait. A copy
shares the loaded weights' memory, compiles its graphs, stores them in the compile cache and ends; the parent then loads
them as if they had always been there. Whatever goes wrong in a copy costs time and nothing else: what it has not
stored, the parent compiles itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")
TIMEOUT_S = 600.0  # a copy that takes longer hangs


def processes(count: int, *, stated: int | None = None) -> int:
    """Return how many copies should compile `count` graphs: one a core, or as many as the user stated."""
    if not hasattr(os, "fork") or count < 2:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(count, stated or cores))


def compile_in_copies(
    jobs: Sequence[T],
    compile_and_store: Callable[[T], None],
    *,
    copies: int,
    finished: Callable[[T, float], None] = lambda job, seconds: None,
) -> None:
    """Run `compile_and_store` on every job, in up to `copies` forked processes, each job in a fresh one.

    Args:
        jobs: what to compile, the longest first.
        compile_and_store: called in the copy; its effect must be on disk.
        copies: how many run at once.
        finished: told in this process which job has ended well, and after how many seconds.
    """
    waiting = list(jobs)
    running: dict[int, tuple[T, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < copies:
                job = waiting.pop(0)
                running[_fork(compile_and_store, job)] = (job, time.monotonic())
            for pid, code in _ended(running):
                job, began = running.pop(pid)
                if code == 0:
                    finished(job, time.monotonic() - began)
            for pid, (_, began) in running.items():
                if time.monotonic() - began > TIMEOUT_S:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
    finally:
        for pid in running:  # an interruption here must not leave them compiling
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _ended(running: dict[int, tuple[T, float]]) -> Iterator[tuple[int, int]]:
    for pid in list(running):
        with contextlib.suppress(ChildProcessError):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                yield pid, os.waitstatus_to_exitcode(status)
            continue
        yield pid, 1  # someone else collected it; what it stored is still found


def _fork(compile_and_store: Callable[[T], None], job: T) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)
        _prepare_copy()
        compile_and_store(job)
        code = 0
    except BaseException:  # the parent compiles it again, and then the error is raised where it is seen
        code = 1
    finally:
        os._exit(code)  # nothing of the parent's may be run here: no exit handlers, no buffers, no locks


def _prepare_copy() -> None:
    """Make the compiler safe in a copy: no parallel loop (its threads were not copied), no pool of helpers."""
    import torch._inductor.config as inductor_config

    # The generated code is for as many threads as the parent runs, whatever the copy may use itself.
    inductor_config.cpp.threads = torch.get_num_threads()
    torch.set_num_threads(1)
    inductor_config.compile_threads = 1
