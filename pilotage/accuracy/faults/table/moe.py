"""Experts: routing, its normalisation and precision, and what is loaded into which expert."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pilotage.accuracy.faults.fault import Fault, Plant, loads, operator, reads

_moe = partial(Fault, heading="MoE", where=("*.mlp.experts", "*.mlp"))


def _routing(wrong: Callable[..., Tensor]) -> Plant:
    return operator("expert_affinities", wrong)


def _raw(real: Any, logits: Tensor, **how: Any) -> Tensor:
    """The kept logits themselves as weights."""
    kept = real(logits, **how)
    return torch.where(kept != 0, logits.float(), 0.0)


def _other_rule(real: Any, logits: Tensor, **how: Any) -> Tensor:
    return real(logits, **{**how, "rule": "softmax_topk"})


def _biased(real: Any, x: Tensor, affinities: Tensor, *weights: Any, **how: Any) -> Tensor:
    """The biases of down projections added as they are, not weighted."""
    *others, bias = weights
    out = real(x, affinities, *others, None, **how)
    return out + ((affinities != 0).to(bias.dtype) @ bias).to(out.dtype)


def _blocks(change: Callable[[Any], None]) -> Plant:
    def edit(model: Any) -> None:
        for layer in model.model.layers:
            if hasattr(layer.mlp, "experts"):
                change(layer.mlp)

    return loads(edit)


def _rotated(block: Any) -> None:
    block.experts.gate_up_proj.copy_(block.experts.gate_up_proj.roll(1, 0))
    block.experts.down_proj.copy_(block.experts.down_proj.roll(1, 0))


def _gate_and_up(block: Any) -> None:
    gate, up = block.experts.gate_up_proj.clone().chunk(2, 1)
    block.experts.gate_up_proj.copy_(torch.cat((up, gate), 1))


def _one_expert_lost(model: Any) -> None:
    experts = model.model.layers[2].mlp.experts
    experts.down_proj[3] = 0.02 * torch.randn(experts.down_proj[3].shape, generator=torch.Generator().manual_seed(0))


def _second_lost(real: Any, logits: Tensor, **how: Any) -> Tensor:
    """The smallest of a token's weights is lost."""
    kept = real(logits, **how)
    least = torch.where(kept > 0, kept, float("inf")).amin(-1, keepdim=True)
    return torch.where(kept == least, 0.0, kept)


def _summed_in_bf16(real: Any, x: Tensor, affinities: Tensor, *weights: Any, **how: Any) -> Tensor:
    return real(x, affinities, *weights, **how).bfloat16().to(x.dtype)


def _weight_before(real: Any, x: Tensor, affinities: Tensor, *weights: Any, **how: Any) -> Tensor:
    """The routing weight on an expert's input in place of its output."""
    out = torch.zeros_like(x)
    for expert in range(affinities.shape[-1]):
        share = affinities[:, expert : expert + 1].to(x.dtype)
        only = torch.zeros_like(affinities)
        only[:, expert] = (affinities[:, expert] != 0).to(affinities.dtype)
        out = out + real(x * share, only, *weights, **how)
    return out


def _as_halves(block: Any) -> None:
    block.experts.interleaved = False


def _two_exchanged(model: Any) -> None:
    down = model.model.layers[2].mlp.experts.down_proj
    down[[0, 1]] = down[[1, 0]].clone()


def _rounded_weights(real: Any, logits: Tensor, **how: Any) -> Tensor:
    return real(logits, **how).bfloat16().float()


FAULTS = (
    _moe(name="kept probabilities not renormalised", model="qwen3_moe", plant=reads(norm_topk_prob=False)),
    _moe(name="kept probabilities not renormalised, Mixtral", model="mixtral", plant=reads(norm_topk_prob=False)),
    _moe(name="logits in place of probabilities", model="qwen3_moe", plant=_routing(_raw)),
    _moe(name="one expert a token fewer", model="qwen3_moe", plant=reads(num_experts_per_token=2)),
    _moe(name="softmax over all experts in place of the chosen", model="gpt_oss", plant=_routing(_other_rule)),
    _moe(
        name="router logits rounded to bf16",
        model="mixtral",
        where=("*.mlp.gate", "*.mlp.router"),
        plant=operator("router_logits", lambda real, *a: real(*a).bfloat16().to(a[0].dtype)),
    ),
    _moe(
        name="router's bias not loaded",
        model="gpt_oss",
        only="loading",
        where=("*.mlp.router",),
        plant=_blocks(lambda block: block.router.bias.zero_()),
    ),
    _moe(name="experts loaded one place off", model="mixtral", only="loading", plant=_blocks(_rotated)),
    _moe(name="w1 and w3 exchanged", model="mixtral", only="loading", plant=_blocks(_gate_and_up)),
    _moe(name="one expert of one layer not loaded", model="qwen3_moe", only="loading", plant=loads(_one_expert_lost)),
    _moe(name="SwiGLU not clamped", model="gpt_oss", plant=reads(swiglu_limit=1e9)),
    _moe(name="SwiGLU's alpha 1", model="gpt_oss", plant=reads(swiglu_alpha=1.0)),
    _moe(name="biases of experts not weighted", model="gpt_oss", plant=operator("experts", _biased)),
    _moe(
        name="gate and up biases of experts not loaded",
        model="gpt_oss",
        only="loading",
        plant=_blocks(lambda block: block.experts.gate_up_proj_bias.zero_()),
    ),
    _moe(name="least of the weights lost", model="mixtral", plant=_routing(_second_lost)),
    _moe(name="experts' sum in bf16", model="qwen3_moe", plant=operator("experts", _summed_in_bf16)),
    _moe(name="weights on the experts' input", model="mixtral", plant=operator("experts", _weight_before)),
    _moe(name="alternating gate and up read as halves", model="gpt_oss", plant=_blocks(_as_halves)),
    _moe(
        name="down projections of two experts exchanged", model="mixtral", only="loading", plant=loads(_two_exchanged)
    ),
    _moe(name="routing weights rounded to bf16", model="qwen3_moe", plant=_routing(_rounded_weights)),
    _moe(
        name="another activation in experts",
        model="qwen3_moe",
        plant=operator("experts", lambda real, *a, **how: real(*a, **{**how, "activation": "gelu"})),
    ),
)
