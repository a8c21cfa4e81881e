"""Routing and experts: the documented pipeline, agreement of the implementations, and nothing leaking in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import pilotage.functional as NF
from pilotage.core.errors import Unsupported
from pilotage.core.tap import TapPlan, active
from pilotage.models.common.moe import SparseMoE
from pilotage.nn import Experts

E, D, F, K = 8, 12, 10, 3


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "gate_up_weight": (E, 2 * F, D),
        "down_weight": (E, D, F),
        "gate_up_bias": (E, 2 * F),
        "down_bias": (E, D),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def one_by_one(x: Tensor, affinities: Tensor, w: dict[str, Tensor], interleaved: bool) -> Tensor:
    """Each token and expert by itself, with SiLU."""
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for e in range(E):
            if affinities[t, e]:
                hidden = w["gate_up_weight"][e] @ x[t] + w["gate_up_bias"][e]
                gate, up = (hidden[::2], hidden[1::2]) if interleaved else (hidden[:F], hidden[F:])
                out[t] += affinities[t, e] * (w["down_weight"][e] @ (gate * gate.sigmoid() * up) + w["down_bias"][e])
    return out


def test_the_documented_pipeline_of_replaced_logits() -> None:
    """TopK, softmax, scatter, as the tensor replacement document writes it."""
    logits = torch.randn(5, E)
    top_values, top_indices = torch.topk(logits.to(torch.float32), K, dim=-1)
    top_values = torch.nn.functional.softmax(top_values, dim=-1)
    expected = torch.zeros(5, E).scatter_(1, top_indices, top_values)
    assert torch.equal(NF.expert_affinities(logits, top_k=K, rule="topk_softmax"), expected)
    overridden = NF.router(
        torch.randn(5, D), torch.randn(E, D), top_k=K, rule="topk_softmax", router_logits_override=logits
    )
    assert torch.equal(overridden, expected)


def test_softmax_first_keeps_probabilities_and_renormalises_when_told() -> None:
    logits = torch.randn(5, E)
    kept = NF.expert_affinities(logits, top_k=K, rule="softmax_topk")
    probabilities = torch.softmax(logits, -1)
    assert ((kept == 0) | (kept == probabilities)).all() and ((kept > 0).sum(-1) == K).all()
    assert torch.equal(kept.argmax(-1), logits.argmax(-1))
    whole = NF.expert_affinities(logits, top_k=K, rule="softmax_topk", renormalize=True)
    torch.testing.assert_close(whole, NF.expert_affinities(logits, top_k=K, rule="topk_softmax"))
    assert NF.expert_affinities(logits.bfloat16(), top_k=K, rule="softmax_topk").dtype is torch.float32
    with pytest.raises(Unsupported, match="'sigmoid' is not implemented"):
        NF.expert_affinities(logits, top_k=K, rule="sigmoid")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("implementation", ["torch", "chosen"])
def test_experts_are_the_sum_over_tokens_and_experts(implementation: str, interleaved: bool) -> None:
    x, w = torch.randn(1, D), weights()
    affinities = NF.expert_affinities(torch.randn(1, E), top_k=K, rule="topk_softmax")
    expected = one_by_one(x, affinities, w, interleaved)
    with NF.forced({"experts": implementation}):
        got = NF.experts(x, affinities, **w, top_k=K, activation="silu", interleaved=interleaved)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_few_tokens_read_the_chosen_experts_alone() -> None:
    x, w = torch.randn(2, 1, D), weights()
    options: dict[str, Any] = {"top_k": 2, "activation": "silu"}
    affinities = NF.expert_affinities(torch.randn(2, 1, E), top_k=2, rule="topk_softmax")
    explained = NF.explain("experts", x, affinities, *w.values(), **options)
    assert explained["implementation"] == "chosen"
    assert NF.explain("experts", x.expand(2, 9, D), affinities, *w.values(), **options)["implementation"] == "torch"
    assert NF.experts(x, affinities, **w, **options).shape == x.shape


def test_the_clamped_swiglu_is_that_of_transformers() -> None:
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(
        num_local_experts=E, hidden_size=D, intermediate_size=F, num_experts_per_tok=K, swiglu_limit=1.0
    )
    config._experts_implementation = "eager"
    theirs = GptOssExperts(config)
    ours = Experts(
        E,
        D,
        F,
        top_k=K,
        activation="clamped_swiglu",
        bias=True,
        interleaved=True,
        inputs_first=True,
        alpha=1.702,
        limit=1.0,
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter))
        ours.load_state_dict(theirs.state_dict())
        x, logits = torch.randn(6, D), torch.randn(6, E)
        top, chosen = logits.topk(K)
        expected = theirs(x, chosen, top.softmax(-1))
        got = ours(x, NF.expert_affinities(logits, top_k=K, rule="topk_softmax"))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(Unsupported, match="needs alpha and limit"):
        NF.experts(x, logits, **weights(), top_k=K, activation="clamped_swiglu")


def test_an_expert_that_is_not_chosen_does_not_leak() -> None:
    x, w = torch.randn(4, D), weights()
    affinities = torch.zeros(4, E)
    affinities[:, 2] = 1.0
    clean = NF.experts(x, affinities, **w, top_k=1, activation="silu")
    w["down_weight"][5] = float("nan")
    assert torch.equal(NF.experts(x, affinities, **w, top_k=1, activation="silu"), clean)


def block() -> SparseMoE:
    from types import SimpleNamespace

    config: Any = SimpleNamespace(
        num_experts=E,
        num_experts_per_token=K,
        moe_intermediate_size=F,
        hidden_size=D,
        norm_topk_prob=True,
        activation="silu",
    )
    made = SparseMoE(config, 4)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return made.requires_grad_(False)


def test_router_logits_are_recorded_and_replaced_in_one_graph() -> None:
    """Other values and another mask in the same buffers: no second graph; a row without the mask keeps its own."""
    moe, x = block(), torch.randn(6, D)
    site = "model.layers.4.mlp.router"
    plan = TapPlan(
        capture={site: torch.zeros(6, E), "model.layers.4.mlp.experts": torch.zeros(6, D)},
        reference={site: torch.zeros(6, E)},
        mask=torch.zeros(6, dtype=torch.bool),
    )
    plain = moe(x)
    torch._dynamo.reset()
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True, dynamic=False)
    with active(plan):
        torch.testing.assert_close(compiled(x), plain)
        torch.testing.assert_close(plan.capture[site], moe.gate(x))
        torch.testing.assert_close(plan.capture["model.layers.4.mlp.experts"], plain)
        with torch.compiler.set_stance("fail_on_recompile"):
            plan.reference[site].copy_(torch.randn(6, E))
            plan.mask[2:] = True  # type: ignore[index]
            replaced = compiled(x)
    torch.testing.assert_close(replaced[:2], plain[:2])
    affinities = NF.expert_affinities(plan.reference[site], top_k=K, rule="softmax_topk", renormalize=True)
    torch.testing.assert_close(replaced[2:], moe.experts(x, affinities)[2:])
    assert not torch.allclose(replaced[2:], plain[2:])
