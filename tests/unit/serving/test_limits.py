"""Memory and threads: what this machine, its container and the user allow."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from pilotage.serving import memory, threads


def test_free_memory_respects_the_container(tmp_path: Path) -> None:
    machine = psutil.virtual_memory().available
    assert memory.free_bytes(tmp_path) == pytest.approx(machine, rel=0.2)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert memory.free_bytes(tmp_path) == pytest.approx(machine, rel=0.2)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    assert memory.free_bytes(tmp_path) == 100_000
    (tmp_path / "memory.stat").write_text("anon 1\nfile 300000\n")
    assert memory.free_bytes(tmp_path) == 400_000


def test_free_memory_respects_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = psutil.Process().memory_info().rss
    monkeypatch.setenv("PILOTAGE_MEMORY_BYTES", str(used + 10_000_000))
    assert memory.free_bytes(tmp_path) == pytest.approx(10_000_000, abs=5_000_000)
    monkeypatch.setenv("PILOTAGE_MEMORY_BYTES", "1")
    assert memory.free_bytes(tmp_path) == 0


@pytest.mark.parametrize(("cores", "ranks", "count"), [(2, 1, 2), (2, 2, 1), (16, 4, 4), (3, 2, 1), (1, 4, 1)])
def test_ranks_share_the_cores(cores: int, ranks: int, count: int) -> None:
    assert threads.per_rank(cores, ranks) == count


def test_what_the_user_states_is_kept_and_what_was_chosen_is_chosen_again() -> None:
    stated = {"OMP_NUM_THREADS": "5"}
    assert threads.set_environment(2, stated) == 5
    assert stated["PILOTAGE_NUM_THREADS"] == "5"
    assert threads.set_environment(1, {"PILOTAGE_NUM_THREADS": "3", "OMP_NUM_THREADS": "5"}) == 3

    cores = len(os.sched_getaffinity(0))
    fresh: dict[str, str] = {}
    assert threads.set_environment(1, fresh) == cores
    assert fresh["OMP_NUM_THREADS"] == str(cores)
    # A second engine in the same process, with more ranks: the first one's choice is no statement of the user.
    assert threads.set_environment(cores, fresh) == 1
