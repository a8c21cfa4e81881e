"""The same through the real engine: every planted fault fails, and twenty seeds of each clean model pass."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from planted import FAULTS, Fault

from pilotage.accuracy.validate import validate
from pilotage.core.nouns import Status

pytestmark = pytest.mark.engine


def alarms(result: Any) -> list[Any]:
    """Everything that is not a pass."""
    verdicts = [*result.verdicts, *(verdict for arm in result.arms for verdict in arm.verdicts)]
    found: list[Any] = [(v.claim, v.estimate, v.interval, v.bound) for v in verdicts if v.status is not Status.PASS]
    return found + [module for module in result.modules if module["verdict"]["status"] != "pass"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.usefixtures("uncompiled_controls")
def test_planted_fault_fails_in_the_engine(
    fault: Fault, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tiny(fault.model)
    checkpoint = fault.plant(original, tmp_path / "planted")
    if fault.patch is not None:
        fault.patch(monkeypatch)
    result = validate(str(checkpoint), reference=str(original), eager=True, modules=False)
    statuses = {arm.arm: arm.status for arm in result.arms}
    assert result.status is Status.FAIL
    assert all(statuses[arm] is Status.FAIL for arm in fault.arms), statuses


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", ["llama3", "gemma3", "qwen3"])
def test_no_false_alarm_on_clean_models(name: str, seed: int, tiny: Callable[..., Path]) -> None:
    result = validate(str(tiny(name, seed=seed)), eager=True)
    assert not alarms(result)
    assert result.status is Status.PASS


@pytest.mark.slow
@pytest.mark.real_weights
def test_no_false_alarm_on_gemma3_270m() -> None:
    """Compiled, as it is served; in a process of its own, with the user's cache of checkpoints and graphs."""
    assert command("gemma3-270m", home=None)[0] == 0


def command(*arguments: str, home: Path | None) -> tuple[int, dict[str, Any], str]:
    import os

    environment = {key: value for key, value in os.environ.items() if key != "PILOTAGE_HOME"}
    if home is not None:
        environment["PILOTAGE_HOME"] = str(home)
    done = subprocess.run(
        [sys.executable, "-m", "pilotage", "validate", *arguments, "--json"],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        timeout=580,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def test_the_command_fails_a_wrong_window_and_says_where(
    tiny: Callable[..., Path], tmp_path: Path, one_home: Path
) -> None:
    fault = next(fault for fault in FAULTS if fault.name == "window one longer")
    original = tiny("gemma3")
    checkpoint = fault.plant(original, tmp_path / "planted")
    code, found, _ = command(
        str(checkpoint), "--reference", str(original), "--arm", "float32", "--eager", home=one_home
    )
    assert code == 1
    assert found["status"] == "fail"
    config, encoding = found["verdicts"]
    assert encoding["status"] == "pass"
    assert config["evidence"]["differing"] == {"sliding_window": {"target": 17, "reference": 16}}
    (arm,) = found["arms"]
    assert arm["arm"] == "float32" and arm["status"] == "fail"
    for verdict in arm["verdicts"]:
        assert verdict["bound"] is not None and verdict["bound_source"] and verdict["n"] > 0
    phases = {row["phase"] for row in arm["by_position"]}
    assert phases == {"prefill", "decode"}
    row = arm["by_position"][-1]
    for side in ("target", "baseline"):
        assert set(row[side]) == {"linf", "l2", "kl", "top1", "ulps"}
    assert set(arm["topk_errors"]) == {"5", "50", "1000", "all"}
    # Inside the window nothing is wrong, past it everything is.
    ratios = [(row["position"], row["ratio"]["l2"]) for row in arm["by_position"] if row["stream"] == 3]
    assert all(ratio < 10 for position, ratio in ratios if position < 16)
    assert all(ratio > 1000 for position, ratio in ratios if position >= 17)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tiny:gema3"], "gemma3"),
        (["/nowhere/at/all"], "no such file or directory"),
        (["tiny:gemma3", "--arm", "int4"], "bfloat16 or float32"),
        (["tiny:gemma3", "--reference", "/nowhere"], "no such file or directory"),
    ],
)
def test_bad_input_is_one_clear_line(
    arguments: list[str], says: str, said: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, error = said("validate", *arguments)
    assert code == 2 and not out
    assert says in error and "Traceback" not in error
