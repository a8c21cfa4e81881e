"""The allow list of upstream's tests: what it excludes has a reason, and a pattern means what it says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parents[1] / "upstream"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"upstream_{name}", HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


def test_every_exclusion_has_a_reason(tmp_path: Path) -> None:
    run = module("run")
    assert len(run.read_chosen(HERE / "chosen.toml")) > 15
    bad = tmp_path / "c.toml"
    bad.write_text('[[file]]\npath = "a"\nabout = "b"\nexclude = [{ tests = ["x"] }]\n')
    with pytest.raises(ValueError, match="needs tests and a reason"):
        run.read_chosen(bad)


def test_patterns() -> None:
    excluded = module("recorder").is_excluded
    assert excluded("tests/a.py::test_x[1-2]", ["test_x"])
    assert excluded("tests/a.py::test_x[1-2]", ["test_x[1-2]"])
    assert not excluded("tests/a.py::test_x[1-3]", ["test_x[1-2]"])
    assert excluded("tests/a.py::test_x[-multimodal]", ["*multimodal*"])
    assert not excluded("tests/a.py::test_xy", ["test_x"])


def test_a_test_counts_once_by_its_last_outcome(tmp_path: Path) -> None:
    run = module("run")
    file = tmp_path / "r.jsonl"
    lines = [("a", "failed"), ("a", "why"), ("a", "failed"), ("b", "passed"), ("c", "excluded")]
    file.write_text("".join(f'{{"test": "{t}", "outcome": "{o}", "why": "because"}}\n' for t, o in lines))
    assert run.count(file) == {"failed": 1, "passed": 1, "excluded": 1}
    assert run.failures(file) == [("a", "because")]
