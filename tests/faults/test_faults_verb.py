"""`pilotage faults`: planted faults are found and named, clean runs stay silent, and a run is taken up again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pilotage.accuracy.faults import run
from pilotage.accuracy.faults.run import Clean, Report
from pilotage.accuracy.faults.table import BY_ID

# Of one model, so that its reference and controls are measured once: a fault of attention, of the experts' weights and
# of the cache in decode.
FEW = (
    "gpt-oss-sinks-dropped-in-decode",
    "gpt-oss-swiglu-not-clamped",
    "gpt-oss-keys-written-as-zeros-in-decode",
)


def names(found: list[dict[str, Any]]) -> list[str]:
    return [one["id"] for one in found]


def test_faults_are_found_and_named_and_a_clean_model_is_left_alone(tmp_path: Path) -> None:
    clean = Clean(model="gpt_oss", seed=0, kernels="plain torch", localised=False)
    report = run.measure(tmp_path, faults=[BY_ID[name] for name in FEW], clean=[clean])
    assert all("float32" in found["detected_by"] for found in report.faults)
    assert names(report.misnamed) == [] and names(report.false_alarms) == []
    assert report.to_json()["status"] == "pass"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_sample_of_ci(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pilotage", "faults", "--sample", "--out", str(tmp_path / "kept"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=880)
    found = json.loads(done.stdout)
    assert done.returncode == 0, (found["counts"], done.stderr)
    assert found["counts"]["faults"] == 12 and found["counts"]["clean"] == 10


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_faults_of_two_ranks_are_found(tmp_path: Path) -> None:
    chosen = [fault for fault in BY_ID.values() if fault.ranks == 2][:3]
    report: Report = run.measure(tmp_path, faults=chosen)
    assert all(found["detected"] for found in report.faults), report.to_json()["counts"]


def test_a_pattern_that_means_nothing_is_explained(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pilotage", "faults", "--only", "no such case", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert "'no such case' means no case" in done.stderr and "Traceback" not in done.stderr
