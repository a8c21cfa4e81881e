"""The voyage with small programs as stages: real processes, real files, real interruptions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from pilotage.core.errors import BadInput, StorageError, Unavailable
from pilotage.core.nouns import Status
from pilotage.report.record import STAGES, read
from pilotage.voyage import fingerprint, process
from pilotage.voyage.course import Leg
from pilotage.voyage.onboard import Arrival, sail
from pilotage.voyage.rundir import RunDir, slug

VOYAGE = {"model": "m", "fingerprint": "abc"}
PASSING = {
    "diff": {"checklist": [{"row": "a", "verdict": "same"}], "work_items": []},
    "weights": {"status": "pass", "tensors": [{"key": "a", "action": "load", "bytes": 4}]},
    "smoke": {"verdicts": [{"status": "pass", "claim": "c"}], "buckets": [], "prompts": []},
    "validate": {"status": "pass", "arms": [{"arm": "float32", "status": "pass"}]},
    "bench": {"arms": {"pilotage": {}}, "ratios": [{"load": "x1", "ratio": 1.5, "against": "hf"}]},
}


LIGHT = ("diff", "weights")


def program(marks: Path, name: str, result: Any, *, code: int = 0, body: str = "") -> Leg:
    """A stage that notes that it ran, does `body`, prints `result` and leaves with `code`."""
    source = textwrap.dedent(
        f"""
        import json, os, sys, time
        with open({str(marks / name)!r}, "a") as f: f.write("x")
        {body}
        print(json.dumps({result!r})); sys.exit({code})
        """
    )
    command = (sys.executable, "-c", source)
    return Leg(stage=name, command=command, shown=f"pilotage {name}", light=name in LIGHT)


@pytest.fixture(autouse=True)
def fixed_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sources may change under a test run (an editor is open); only one test wants to see that."""
    monkeypatch.setattr(fingerprint, "code", lambda: "this code")


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    (tmp_path / "marks").mkdir()
    return tmp_path / "marks"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    directory = RunDir(tmp_path / "run")
    directory.prepare()
    return directory


def legs(marks: Path, **changes: Leg) -> list[Leg]:
    planned = {name: program(marks, name, result) for name, result in PASSING.items()}
    planned["implement"] = Leg(
        stage="implement", result={"architecture": "X", "supported": True, "origin": "test"}, light=True
    )
    planned["register"] = Leg(
        stage="register", result={"checks": [{"claim": "c", "found": "f", "ok": True}]}, light=True
    )
    planned |= changes
    return [planned[stage.name] for stage in STAGES]


def ran(marks: Path, name: str) -> int:
    return len((marks / name).read_text()) if (marks / name).exists() else 0


def statuses(arrival: Arrival) -> dict[str, str]:
    return {record.stage: record.status.value for record in arrival.records}


def test_all_stages_pass_and_leave_records_and_a_report(run: RunDir, marks: Path) -> None:
    arrival = sail(run, legs(marks), VOYAGE)
    assert arrival.status is Status.PASS
    assert set(statuses(arrival).values()) == {"pass"}
    assert arrival.report == run.path / "report.html"
    records = read(run.path)
    assert set(records.stages) == {stage.name for stage in STAGES}
    assert records.stages["validate"].result == PASSING["validate"]


def test_a_second_run_keeps_what_is_unchanged(run: RunDir, marks: Path) -> None:
    sail(run, legs(marks), VOYAGE)
    again = sail(run, legs(marks), VOYAGE)
    assert again.kept == {stage.name for stage in STAGES}
    assert all(ran(marks, name) == 1 for name in PASSING)


def test_another_checkpoint_or_option_runs_the_stages_again(run: RunDir, marks: Path) -> None:
    sail(run, legs(marks), VOYAGE)
    sail(run, legs(marks), {**VOYAGE, "fingerprint": "other"})
    assert all(ran(marks, name) == 2 for name in PASSING)
    bench = program(marks, "bench", PASSING["bench"])
    changed = Leg(stage="bench", command=bench.command, shown="", depends={"peer_python": "/peer/bin/python"})
    arrival = sail(run, legs(marks, bench=changed), {**VOYAGE, "fingerprint": "other"})
    assert ran(marks, "bench") == 3
    assert "bench" not in arrival.kept and "validate" in arrival.kept


def test_another_version_of_the_code_runs_the_stages_again(
    run: RunDir, marks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sail(run, legs(marks), VOYAGE)
    monkeypatch.setattr(fingerprint, "code", lambda: "other code")
    assert sail(run, legs(marks), VOYAGE).kept == frozenset()


def test_a_verdict_of_fail_is_kept_and_what_was_not_measured_runs_again(run: RunDir, marks: Path) -> None:
    def planned() -> list[Leg]:
        return legs(
            marks,
            validate=program(marks, "validate", {"status": "fail", "arms": [{"arm": "a", "status": "fail"}]}, code=1),
            bench=program(marks, "bench", {"arms": {"pilotage": {}}, "ratios": []}, code=2),
        )

    first = sail(run, planned(), VOYAGE)
    assert first.status is Status.FAIL
    second = sail(run, planned(), VOYAGE)
    assert "validate" in second.kept and ran(marks, "validate") == 1
    assert ran(marks, "bench") == 2
    assert statuses(second)["validate"] == "fail" and statuses(second)["bench"] == "not_measured"


def test_a_crash_is_not_measured_and_stops_what_needs_it(run: RunDir, marks: Path) -> None:
    crashed = program(marks, "smoke", {}, body="print('engine said no', file=sys.stderr); os.kill(os.getpid(), 11)")
    validate = program(marks, "validate", PASSING["validate"])
    needy = Leg(stage="validate", command=validate.command, shown="", needs=("smoke",))
    arrival = sail(run, legs(marks, smoke=crashed, validate=needy), VOYAGE)
    assert arrival.status is Status.NOT_MEASURED
    smoke, validated = arrival.records[4], arrival.records[5]
    assert smoke.status is Status.NOT_MEASURED and not smoke.completed and smoke.result is None
    assert "SIGSEGV" in smoke.reason and "engine said no" in smoke.reason
    assert "smoke" in validated.reason and ran(marks, "validate") == 0
    assert "engine said no" in (run.path / "logs/smoke.log").read_text()


def test_output_that_is_no_json_is_a_crash_even_with_exit_code_0(run: RunDir, marks: Path) -> None:
    chatty = program(marks, "diff", {}, body="print('hello'); sys.exit(0)")
    record = sail(run, legs(marks, diff=chatty), VOYAGE).records[0]
    assert record.status is Status.NOT_MEASURED and not record.completed


def test_an_exit_code_overrules_a_result_that_looks_better(run: RunDir, marks: Path) -> None:
    lying = program(marks, "validate", PASSING["validate"], code=1)
    record = sail(run, legs(marks, validate=lying), VOYAGE).records[5]
    assert record.status is Status.FAIL and "exit code 1" in record.reason


def test_skip_and_redo(run: RunDir, marks: Path) -> None:
    first = sail(run, legs(marks), VOYAGE, skip=("bench",))
    assert first.status is Status.NOT_MEASURED and ran(marks, "bench") == 0
    sail(run, legs(marks), VOYAGE, redo=("validate",))
    assert ran(marks, "validate") == 2 and ran(marks, "weights") == 1 and ran(marks, "bench") == 1


def test_a_stale_record_is_gone_before_anything_runs(run: RunDir, marks: Path) -> None:
    sail(run, legs(marks), VOYAGE)
    seen = marks / "seen"
    spy = program(
        marks, "diff", PASSING["diff"], body=f"open({str(seen)!r}, 'w').write(str(os.listdir({str(run.path)!r})))"
    )
    sail(run, legs(marks, diff=spy), {**VOYAGE, "fingerprint": "other"})
    assert "4-validate.json" not in seen.read_text()


def _start_voyage(run: Path, marks: Path, slow: str) -> subprocess.Popen[bytes]:
    """A voyage in a process of its own whose stage `slow` starts a grandchild and then waits."""
    here = Path(__file__).parent
    source = f"""
import signal, sys; sys.path.insert(0, {str(here)!r})
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would have it ignored
from pathlib import Path
import test_sail as t
marks = Path({str(marks)!r})
body = "import subprocess; p = subprocess.Popen(['sleep', '600'], start_new_session=True); " \\
       "open({str(marks / "pids")!r}, 'w').write(f'{{os.getpid()}} {{p.pid}}'); time.sleep(600)"
from pilotage.voyage import fingerprint
from pilotage.voyage.rundir import RunDir
fingerprint.code = lambda: "this code"
run = RunDir(Path({str(run)!r})); run.prepare()
with run.locked():
    t.sail(run, t.legs(marks, **{{{slow!r}: t.program(marks, {slow!r}, {{}}, body=body)}}), t.VOYAGE)
"""
    process = subprocess.Popen([sys.executable, "-c", source], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not (marks / "pids").exists() or not (marks / "pids").read_text():
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline, "the slow stage never started"
        time.sleep(0.05)
    return process


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc and prctl (Linux)")
@pytest.mark.parametrize(
    ("slow", "signum"),
    [
        ("validate", signal.SIGKILL),
        ("validate", signal.SIGINT),
        ("validate", signal.SIGTERM),
        ("weights", signal.SIGKILL),  # one of those that run side by side
        ("weights", signal.SIGINT),
    ],
)
def test_interrupted_mid_stage_it_leaves_whole_records_no_processes_and_resumes(
    tmp_path: Path, run: RunDir, marks: Path, slow: str, signum: signal.Signals
) -> None:
    voyage = _start_voyage(run.path, marks, slow)
    pids = [int(pid) for pid in (marks / "pids").read_text().split()]
    with pytest.raises(Unavailable, match="another voyage"), RunDir(run.path).locked():
        pass
    voyage.send_signal(signum)
    voyage.wait(30)
    deadline = time.monotonic() + 20
    while not all(_gone(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(_gone(pid) for pid in pids), "something of the stage outlived the voyage"

    records = read(run.path)
    assert not records.unreadable
    assert slow not in records.stages
    with run.locked():
        arrival = sail(run, legs(marks), VOYAGE)
    assert arrival.status is Status.PASS
    assert ran(marks, slow) == 2
    if slow == "validate":
        assert {"diff", "weights", "smoke"} <= arrival.kept and ran(marks, "smoke") == 1


def test_light_stages_run_side_by_side_and_heavy_ones_alone(run: RunDir, marks: Path) -> None:
    def meet(mine: str, other: str) -> str:
        """Wait for the other one: together they end, one after the other they would not."""
        there = f"os.path.exists({str(marks / other)!r})"
        lines = (
            "end = time.time() + 60",
            f"while not {there} and time.time() < end: time.sleep(0.02)",
            f"assert {there}",
        )
        return "\n        ".join(lines)

    arrival = sail(
        run,
        legs(
            marks,
            diff=program(marks, "diff", PASSING["diff"], body=meet("diff", "weights")),
            weights=program(marks, "weights", PASSING["weights"], body=meet("weights", "diff")),
            smoke=program(
                marks, "smoke", PASSING["smoke"], body=f"assert not os.path.exists({str(marks / 'validate')!r})"
            ),
        ),
        VOYAGE,
    )
    assert arrival.status is Status.PASS, [record.reason for record in arrival.records]


def test_a_full_disk_in_one_light_stage_ends_the_others(run: RunDir, marks: Path) -> None:
    full = program(
        marks, "diff", {}, body="print('pilotage: /x: no space left on the device', file=sys.stderr); sys.exit(2)"
    )
    slow = program(marks, "weights", {}, body="time.sleep(600)")
    began = time.monotonic()
    with pytest.raises(StorageError, match="no space left"):
        sail(run, legs(marks, diff=full, weights=slow), VOYAGE)
    assert time.monotonic() - began < 60


def test_the_lock_is_free_again_after_a_voyage(run: RunDir) -> None:
    with run.locked():
        pass
    with run.locked():
        pass


def test_a_full_disk_is_said_at_once_and_leaves_no_half_record(
    run: RunDir, marks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def full(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if "3-weights" in name:
            raise OSError(28, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patched, pytest.raises(StorageError, match="no space left") as caught:
        patched.setattr(os, "fsync", full)
        sail(run, legs(marks), VOYAGE)
    assert caught.value.exit_code == 2
    assert not (run.path / "3-weights.json").exists()
    assert not list(run.path.glob(".*.part"))
    assert sail(run, legs(marks), VOYAGE).status is Status.PASS
    assert ran(marks, "diff") == 1


def test_a_disk_that_is_almost_full_is_said_before_a_stage_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("usage", (), {"free": 1 << 20})
    monkeypatch.setattr("pilotage.voyage.rundir.shutil.disk_usage", lambda path: usage)
    with pytest.raises(StorageError, match="1 MB free"):
        RunDir(tmp_path / "r").prepare()


def test_a_stage_that_meets_a_full_disk_stops_the_voyage(run: RunDir, marks: Path) -> None:
    full = program(
        marks,
        "weights",
        {},
        body="print('pilotage: /x: no space left on the device; free some', file=sys.stderr); sys.exit(2)",
    )
    with pytest.raises(StorageError, match="no space left"):
        sail(run, legs(marks, weights=full), VOYAGE)
    assert not (run.path / "3-weights.json").exists()


def test_a_real_full_disk(tmp_path: Path) -> None:
    """The run directory on a file system of 200 kB that fills up while records are written."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(mount)], check=False).returncode:
        pytest.skip("this machine does not let us mount")
    try:
        run = RunDir(mount / "run")
        run.path.mkdir()
        big = Leg(stage="weights", result={"status": "pass", "tensors": [{"key": "k" * 50, "bytes": 1}] * 5000})
        with pytest.raises(StorageError, match="no space left"):
            sail(run, [big], VOYAGE)
        assert not (run.path / "3-weights.json").exists() and not list(run.path.glob(".*"))
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_directories_that_are_not_ours_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("x")
    with pytest.raises(BadInput, match="other things"):
        RunDir(tmp_path / "other").prepare()
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInput, match="a file"):
        RunDir(tmp_path / "file").prepare()


def test_fresh_removes_our_files_and_no_others(run: RunDir, marks: Path) -> None:
    sail(run, legs(marks), VOYAGE)
    (run.path / "notes.txt").write_text("mine")
    run.clear()
    assert sorted(path.name for path in run.path.iterdir()) == ["notes.txt"]


@pytest.mark.parametrize(
    ("model", "expected"),
    [("tiny:llama3", "tiny-llama3"), ("org/name", "org-name"), ("../../etc", "etc"), ("::", "model")],
)
def test_slug(model: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert slug(model) == expected


def test_fingerprints_change_with_content_and_not_with_time(tmp_path: Path) -> None:
    directory = tmp_path / "ckpt"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"1" * 100)
    first = fingerprint.checkpoint(directory)
    os.utime(directory / "model.safetensors", (1, 1))
    assert fingerprint.checkpoint(directory) == first
    (directory / "model.safetensors").write_bytes(b"1" * 99 + b"2")
    assert fingerprint.checkpoint(directory) != first


def test_environment_that_changes_results_is_part_of_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint.stage("smoke", checkpoint_digest="a", options={})
    monkeypatch.setenv("PILOTAGE_HOME", "/elsewhere")
    assert fingerprint.stage("smoke", checkpoint_digest="a", options={}) == before
    monkeypatch.setenv("PILOTAGE_DISABLE_KERNELS", "1")
    assert fingerprint.stage("smoke", checkpoint_digest="a", options={}) != before


def test_last_line_skips_terminal_codes_and_progress(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"first\n\x1b[32mcompile 1/7\x1b[0m\rcompile 2/7\r\n\n")
    assert process.last_line(log) == "compile 2/7"
    assert process.last_line(tmp_path / "missing") == ""


def test_records_are_json_that_reads_back(run: RunDir, marks: Path) -> None:
    sail(run, legs(marks), VOYAGE)
    value = json.loads((run.path / "4-validate.json").read_text())
    assert value["schema"] == 1 and value["completed"] is True and len(value["fingerprint"]) == 64
