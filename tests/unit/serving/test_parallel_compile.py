"""Compiling in copies: what ends well is told, what does not is left to the caller, and nothing hangs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch._inductor.config  # once, here, and not in every copy

from pilotage.serving import parallel_compile


def test_every_job_runs_once_and_leaves_its_file(tmp_path: Path) -> None:
    done: dict[int, float] = {}

    def work(job: int) -> None:
        (tmp_path / str(job)).write_text(str(os.getpid()))

    parallel_compile.compile_in_copies(range(5), work, copies=2, finished=lambda job, s: done.update({job: s}))
    assert sorted(done) == [0, 1, 2, 3, 4]
    pids = {(tmp_path / str(job)).read_text() for job in range(5)}
    assert len(pids) == 5 and str(os.getpid()) not in pids


def test_jobs_run_at_the_same_time_but_not_too_many(tmp_path: Path) -> None:
    def work(job: int) -> None:
        (tmp_path / f"began-{job}").touch()
        at_once = len(list(tmp_path.glob("began-*"))) - len(list(tmp_path.glob("ended-*")))
        (tmp_path / f"seen-{job}").write_text(str(at_once))
        if job < 2:  # the first two wait for each other: they can only end if they run together
            deadline = time.monotonic() + 60
            while not (tmp_path / f"began-{1 - job}").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        (tmp_path / f"ended-{job}").touch()

    began = time.monotonic()
    parallel_compile.compile_in_copies(range(6), work, copies=2)
    assert time.monotonic() - began < 60
    assert max(int((tmp_path / f"seen-{job}").read_text()) for job in range(6)) <= 2


def test_a_copy_that_fails_or_dies_is_not_reported_and_stops_no_other(tmp_path: Path) -> None:
    def work(job: str) -> None:
        if job == "raises":
            raise ValueError(job)
        if job == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        (tmp_path / job).touch()

    done: list[str] = []
    parallel_compile.compile_in_copies(
        ["raises", "good", "dies", "fine"], work, copies=2, finished=lambda job, _: done.append(job)
    )
    assert sorted(done) == ["fine", "good"]


def test_a_copy_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_compile, "TIMEOUT_S", 5.0)
    done: list[int] = []
    began = time.monotonic()
    parallel_compile.compile_in_copies([0, 60], time.sleep, copies=2, finished=lambda job, _: done.append(job))
    assert done == [0] and time.monotonic() - began < 40


def test_an_interruption_leaves_no_copies(tmp_path: Path) -> None:
    def work(job: int) -> None:
        if job:
            (tmp_path / "pid").write_text(str(os.getpid()))
            time.sleep(60)
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)

    def interrupt(job: int, seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        parallel_compile.compile_in_copies([0, 1], work, copies=2, finished=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_parallel_loops_are_safe_in_a_copy(tmp_path: Path) -> None:
    """A forked process hangs in its first parallel loop when its parent has run one; a copy therefore runs none."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.ones(2_000_000).sum()
        done: list[int] = []
        parallel_compile.compile_in_copies(
            [1], lambda job: torch.ones(2_000_000).exp().sum(), copies=1, finished=lambda job, _: done.append(job)
        )
        assert done == [1]
    finally:
        torch.set_num_threads(before)


def test_how_many_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    assert parallel_compile.processes(1) == 1
    assert parallel_compile.processes(3) == 3
    assert parallel_compile.processes(9) == 4
    assert parallel_compile.processes(9, stated=2) == 2
    assert parallel_compile.processes(9, stated=1) == 1
