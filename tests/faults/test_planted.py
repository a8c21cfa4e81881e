"""Each planted fault is found in the logits and in the module that holds it; clean models raise no alarm.

The served model runs on its paged cache without the engine here, which makes a case cheap; `test_planted_engine.py`
does the same through the engine.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from planted import FAULTS, Fault, PagedArm

from pilotage.accuracy.validate import validate
from pilotage.core.nouns import Status

pytestmark = pytest.mark.usefixtures("uncompiled_controls")

OTHERS = ("qwen2", "qwen3")


# In the fast tests: one that both arms see and modules name, one that fp32 alone sees, and a weight.
FAST = {"window one longer", "norm epsilon 1e-5 in the code", "K and V swapped in one layer", "qkv bias dropped"}
CASES = [pytest.param(fault, id=fault.name, marks=[] if fault.name in FAST else pytest.mark.slow) for fault in FAULTS]


@pytest.mark.parametrize("fault", CASES)
def test_planted_fault_fails(
    fault: Fault, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tiny(fault.model)
    checkpoint = fault.plant(original, tmp_path / "planted")
    if fault.patch is not None:
        fault.patch(monkeypatch)
    result = validate(str(checkpoint), reference=str(original), observe=PagedArm(checkpoint))

    assert result.status is Status.FAIL
    statuses = {arm.arm: arm.status for arm in result.arms}
    assert all(statuses[arm] is Status.FAIL for arm in fault.arms), statuses
    config, encoding = result.verdicts
    assert encoding.status is Status.PASS
    assert config.status is (Status.FAIL if fault.config else Status.PASS)
    assert len(config.evidence["differing"]) == (1 if fault.config else 0)

    failing = {(m["kind"], m["dtype"]) for m in result.modules if m["verdict"]["status"] == "fail"}
    assert set(fault.modules) <= failing, sorted(failing)
    if not any(kind in ("attention", "decoder layer") for kind, _ in fault.modules) and fault.modules:
        assert ("mlp", "float32") not in failing  # each module has the reference's input: errors do not travel


def test_a_tokenizer_that_adds_no_bos_fails(tiny: Callable[..., Path], tmp_path: Path) -> None:
    original = tiny("llama3")
    checkpoint = tmp_path / "converted"
    shutil.copytree(original, checkpoint)
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    tokenizer["post_processor"] = None
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    result = validate(str(checkpoint), reference=str(original), levels=[3], arms=["float32"])
    assert [verdict.status for verdict in result.verdicts] == [Status.PASS, Status.FAIL]
    assert result.verdicts[1].evidence["texts"][0]["reference"][0] == 2
    assert result.status is Status.FAIL


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["llama3", "gemma3", *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS)])
def test_clean_models_pass(name: str, seed: int, tiny: Callable[..., Path]) -> None:
    checkpoint = tiny(name, seed=seed)
    result = validate(str(checkpoint), observe=PagedArm(checkpoint))
    assert result.status is Status.PASS, [
        (verdict.claim, verdict.estimate, verdict.bound)
        for arm in result.arms
        for verdict in arm.verdicts
        if verdict.status is not Status.PASS
    ] + [module for module in result.modules if module["verdict"]["status"] != "pass"]
    assert len(result.modules) > 20
