"""Old compiled graphs are removed, by several processes at once."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pilotage.serving import compile_cache


def fingerprints(root: Path, count: int, age: float) -> list[Path]:
    made = []
    for n in range(count):
        path = root / f"{n:02}"
        path.mkdir()
        when = time.time() - age + n
        os.utime(path, (when, when))
        made.append(path)
    return made


def test_the_oldest_go(tmp_path: Path) -> None:
    made = fingerprints(tmp_path, 15, age=7200)
    (tmp_path / "a file").write_text("")
    compile_cache._prune(tmp_path)
    assert [path.exists() for path in made] == [False] * 3 + [True] * 12


def test_what_may_be_in_use_stays(tmp_path: Path) -> None:
    made = fingerprints(tmp_path, 15, age=60)
    compile_cache._prune(tmp_path)
    assert all(path.exists() for path in made)


def test_another_process_removes_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is listed may be gone by the time that it is looked at."""
    made = fingerprints(tmp_path, 15, age=7200)
    listed = Path.iterdir

    def listing(path: Path) -> list[Path]:
        found = list(listed(path))
        made[0].rmdir()
        return found

    monkeypatch.setattr(Path, "iterdir", listing)
    compile_cache._prune(tmp_path)
    assert [path.exists() for path in made] == [False] * 3 + [True] * 12
