"""`pilotage faults`: planted faults are found and named, clean runs stay silent, and a run is taken up again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pilotage.accuracy.faults import Report, measure
from pilotage.accuracy.faults.table import BY_ID


def test_a_fault_is_found_and_named_and_a_clean_model_left_alone(
    tmp_path: Path, said: Callable[..., tuple[int, str, str]]
) -> None:
    """A fault that everything shows and one that only rounding does; CI runs the sample with the command itself."""
    where = ("--out", str(tmp_path / "kept"), "--json")
    code, out, error = said("faults", "--only", "gemma3-embedding-scale-*", *where)
    found = json.loads(out)
    assert code == 0 and found["status"] == "pass", (found["counts"], error)
    assert {fault["name"] for fault in found["faults"]} == {
        "embedding scale dropped",
        "embedding scale not rounded to bf16",
    }
    assert all(fault["detected"] and fault["named_first"] for fault in found["faults"])
    code, out, error = said("faults", "--only", "gemma3@0-as-served", *where)
    (clean,) = json.loads(out)["clean"]
    assert code == 0 and clean["localised"] and not clean["alarms"], (clean, error)


@pytest.mark.slow
def test_the_sample_is_found_and_named_and_clean_models_are_left_alone(tmp_path: Path) -> None:
    """Twelve faults, one of each component, and ten clean runs: what CI runs of the table (.ci/run)."""
    command = [sys.executable, "-m", "pilotage", "faults", "--sample", "--out", str(tmp_path / "kept"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=580)
    found = json.loads(done.stdout)
    assert done.returncode == 0, (found["counts"], done.stderr)
    assert found["status"] == "pass"
    assert (found["counts"]["faults"], found["counts"]["detected"], found["counts"]["clean"]) == (12, 12, 10)
    assert not (found["counts"]["missed"] or found["counts"]["misnamed"] or found["counts"]["false_alarms"])


@pytest.mark.slow
@pytest.mark.engine
def test_faults_are_found_under_the_engine(tmp_path: Path) -> None:
    """One of attention's options, one of the cache's metadata."""
    names = ("gpt-oss-sinks-dropped-in-decode", "gemma3-padding-writes-the-first-slot")
    report = measure(tmp_path, faults=[BY_ID[name] for name in names], engine=True)
    assert [found["detected"] for found in report.engine] == [True, True]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_faults_of_two_ranks_are_found(tmp_path: Path) -> None:
    chosen = [fault for fault in BY_ID.values() if fault.ranks == 2][:3]
    report: Report = measure(tmp_path, faults=chosen)
    assert all(found["detected"] for found in report.faults), report.to_json()["counts"]


def test_a_pattern_that_means_nothing_is_explained(tmp_path: Path, said: Callable[..., tuple[int, str, str]]) -> None:
    code, _, error = said("faults", "--only", "no such case", "--out", str(tmp_path))
    assert code == 2
    assert "'no such case' means no case" in error and "Traceback" not in error
