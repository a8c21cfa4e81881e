"""Routers as modules: their logits are compared, in the dtype that they are multiplied in, before any choice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pilotage.accuracy import modules
from pilotage.accuracy.arms import hf
from pilotage.accuracy.arms.fallback import FallbackModules
from pilotage.accuracy.arms.module import HFModules, Job
from pilotage.accuracy.modules import ModulePlan
from pilotage.nn import Router

TOKENS = torch.randint(5, 300, (60,), generator=torch.Generator().manual_seed(0)).tolist()
BLOCKS = {"deepseek_v3": "gate", "qwen3_moe": "gate", "mixtral": "gate", "gpt_oss": "router"}


def statuses(path: Path, name: str) -> dict[tuple[str, str], str]:
    model = hf.load(path, torch.float32)
    found = modules.check(path, path, model, TOKENS, plan=ModulePlan(patterns=[f"layers.*.mlp.{name}"]))
    assert {entry["kind"] for entry in found} == {"router"}
    return {(entry["module"], entry["dtype"]): entry["verdict"]["status"] for entry in found}


@pytest.mark.parametrize("model", BLOCKS)
def test_clean_ones_pass_and_a_product_in_half_precision_is_found(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    path, name = tiny(model), BLOCKS[model]
    clean = statuses(path, name)
    assert len(clean) >= 4 and set(clean.values()) == {"pass"}, clean

    real = Router.forward
    monkeypatch.setattr(Router, "forward", lambda self, x: real(self, x.bfloat16().to(x.dtype)).bfloat16().float())
    rounded = statuses(path, name)
    assert {status for (_, dtype), status in rounded.items() if dtype == "float32"} == {"fail"}
    # DeepSeek multiplies in fp32 whatever the model's dtype; the others round there themselves.
    half = {status for (_, dtype), status in rounded.items() if dtype == "bfloat16"}
    assert half == {"fail" if model == "deepseek_v3" else "pass"}


def test_they_are_among_what_is_checked_without_being_asked_for(tiny: Callable[..., Path]) -> None:
    listed, _ = modules.listed(hf.load(tiny("deepseek_v3"), torch.float32), None)
    assert ("layers.3.mlp.gate", "router") in listed
    assert not any(kind == "router" for name, kind in listed if name.startswith("layers.0."))  # a dense layer


def test_the_fallbacks_router_answers_too(tiny: Callable[..., Path]) -> None:
    path = tiny("qwen3_moe")
    name = "layers.3.mlp.gate"
    reference = HFModules(hf.load(path, torch.float32), TOKENS, [name])
    job = Job(name=name, kind="router", label=name, x=reference.calls[name].x, layer_type="")
    found = FallbackModules(path, torch.float32, len(TOKENS)).answer(job)
    assert found is not None
    torch.testing.assert_close(found, reference.logits(name, job.x))
