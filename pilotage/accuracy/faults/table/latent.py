"""Latent attention, and experts that are chosen by groups: DeepSeek-V3."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pilotage.accuracy.faults.fault import Fault, Plant, attends, loads, method, operator, reads

_model = partial(Fault, model="deepseek_v3")
_norm = partial(_model, heading="Bias / norm / activation")
_rope = partial(_model, heading="RoPE", where=("*.self_attn.q_rope",))
_scale = partial(_model, heading="Attention scale / softcap / sinks", where=("*.self_attn.heads",))
_layout = partial(_model, heading="GQA / tensor-parallel layout / fused weights")
_moe = partial(_model, heading="MoE", where=("*.mlp.experts",))


def _each(change: Callable[[Any], None]) -> Plant:
    def edit(model: Any) -> None:
        for layer in model.model.layers:
            change(layer)

    return loads(edit)


def _sparse(change: Callable[[Any], None]) -> Plant:
    return _each(lambda layer: change(layer.mlp) if hasattr(layer.mlp, "experts") else None)


def _without_norm(name: str) -> Callable[[Any], None]:
    def change(layer: Any) -> None:
        getattr(layer.self_attn, name).forward = lambda x: x

    return change


def _other_epsilon(layer: Any) -> None:
    layer.self_attn.q_a_layernorm.eps = layer.self_attn.kv_a_layernorm.eps = layer.input_layernorm.eps


def _scale_of(change: Callable[[Any], float]) -> Plant:
    def edit(layer: Any) -> None:
        layer.self_attn.scale = change(layer.self_attn)

    return _each(edit)


def _plain_amplitude(config: Any) -> Any:
    return {kind: dataclasses.replace(found, amplitude=1.0) for kind, found in config.rope.items()}


def _halves(layer: Any) -> None:
    layer.self_attn.interleaved = False


def _key_not_rotated(real: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return real(q, k, cos, sin)[0], k


def _rotated_first(layer: Any) -> None:
    """Queries whose rotated channels were stored before the others."""
    attention, weight = layer.self_attn, layer.self_attn.q_b_proj.weight
    heads = weight.unflatten(0, (-1, attention.nope + attention.rotated))
    weight.copy_(heads.roll(attention.rotated, 1).flatten(0, 1).clone())


def _all_keys_first(layer: Any) -> None:
    """The keys of all heads, then the values of all heads, in place of head by head."""
    attention, weight = layer.self_attn, layer.self_attn.kv_b_proj.weight
    heads = weight.unflatten(0, (attention.num_heads, -1))
    keys, values = heads[:, : attention.nope], heads[:, attention.nope :]
    weight.copy_(torch.cat((keys.flatten(0, 1), values.flatten(0, 1))).clone())


def _rotated_part_of_the_row(layer: Any) -> None:
    """The cached row's two parts in the other order, as the projection stores them."""
    attention, weight = layer.self_attn, layer.self_attn.kv_a_proj_with_mqa.weight
    weight.copy_(weight.roll(attention.rotated, 0).clone())


def _latent_as_cached(layer: Any, meta: dict[str, Any], options: dict[str, Any]) -> None:
    """What is cached lacks its rotated channels."""
    row = options["k"].clone()
    row[..., layer.latent :] = 0
    options["k"] = row


def _routing(**values: Any) -> Plant:
    return operator("expert_affinities", lambda real, *args, **how: real(*args, **{**how, **values}))


def _best_of_one(real: Any, logits: Tensor, correction: Tensor, *, num_groups: int, top_groups: int, **how: Any) -> Any:
    """Groups are judged by their best expert alone."""
    scores = (logits.float().sigmoid() + correction).unflatten(-1, (num_groups, -1))
    best = scores.amax(-1).topk(top_groups, -1).indices
    kept = torch.zeros_like(scores[..., 0]).scatter(-1, best, 1.0)[..., None] > 0
    # Experts of the other groups cannot be chosen.
    away = torch.where(kept, 0.0, -100.0).expand_as(scores).flatten(-2)
    return real(logits, correction + away, num_groups=1, top_groups=1, **how)


def _weighted_by_correction(real: Any, logits: Tensor, correction: Tensor, *, scale: float, **how: Any) -> Tensor:
    chosen = real(logits, correction, scale=scale, **how) != 0
    weights = torch.where(chosen, logits.float().sigmoid() + correction, 0.0)
    return scale * weights / weights.sum(-1, keepdim=True)


def _no_correction(block: Any) -> None:
    block.gate.e_score_correction_bias.zero_()


def _softmax(real: Any, logits: Tensor, correction: Tensor, *, top_k: int, scale: float, **how: Any) -> Tensor:
    return scale * real(logits, top_k=top_k, rule="softmax_topk", renormalize=how["renormalize"])


def _half_of_the_shared(block: Any) -> None:
    """One shared expert loaded of two."""
    weight = block.shared_experts.down_proj.weight
    weight[:, weight.shape[1] // 2 :] = 0


def _without_shared(block: Any) -> None:
    block.shared_experts.forward = torch.zeros_like


def _shared_scaled(block: Any) -> None:
    real = block.shared_experts.forward
    block.shared_experts.forward = lambda x: block.scale * real(x)


def _in_its_own_dtype(real: Any, self: Any, x: Tensor) -> Tensor:
    """A product in the dtype of the stream, where the reference takes fp32."""
    return (x @ self.weight.to(x.dtype).t()).to(torch.float32)


def _router() -> Any:
    from pilotage.nn import Router

    return Router


FAULTS = (
    _norm(
        name="norm of the keys' latent left out",
        where=("*.self_attn.kv_a_layernorm",),
        plant=_each(_without_norm("kv_a_layernorm")),
    ),
    _norm(
        name="norm of the queries' latent left out",
        where=("*.self_attn.q_a_layernorm",),
        plant=_each(_without_norm("q_a_layernorm")),
    ),
    _norm(
        name="latents normalised with the layers' epsilon",
        where=("*.self_attn.*_a_layernorm",),
        plant=_each(_other_epsilon),
    ),
    _rope(name="YaRN's factor on cos and sin left out", plant=reads(rope=_plain_amplitude)),
    _rope(name="neighbours taken for halves", plant=_each(_halves)),
    _rope(
        name="shared key not rotated",
        where=("*.self_attn.heads", "*.self_attn.kv"),
        plant=operator("rotary", _key_not_rotated),
    ),
    _scale(
        name="YaRN's factor left out of the scores",
        plant=_scale_of(lambda attention: (attention.nope + attention.rotated) ** -0.5),
    ),
    _scale(
        name="width of the cached row in place of the head's",
        plant=_scale_of(lambda attention: attention.head_size**-0.5),
    ),
    _layout(
        name="rotated channels of the queries stored first",
        only="loading",
        where=("*.self_attn.q_b_proj",),
        plant=_each(_rotated_first),
    ),
    _layout(
        name="all heads' keys before all heads' values",
        only="loading",
        where=("*.self_attn.heads", "*.self_attn.kv_b_proj"),
        plant=_each(_all_keys_first),
    ),
    _layout(
        name="rotated channels of the cached row stored first",
        only="loading",
        where=("*.self_attn.kv_a_proj_with_mqa",),
        plant=_each(_rotated_part_of_the_row),
    ),
    _model(
        name="rotated channels not cached",
        heading="KV cache, buckets, graphs",
        where=("*.self_attn.heads", "*.self_attn.kv"),
        plant=attends(_latent_as_cached),
    ),
    _moe(name="groups of experts ignored", plant=_routing(num_groups=1, top_groups=1)),
    _moe(name="groups judged by one expert in place of two", plant=operator("expert_affinities", _best_of_one)),
    _moe(name="correction in the weights as well", plant=operator("expert_affinities", _weighted_by_correction)),
    _moe(name="correction of the choice not loaded", only="loading", plant=_sparse(_no_correction)),
    _moe(name="scale of the weights left out", plant=reads(routed_scaling=1.0)),
    _moe(name="weights not renormalised", plant=reads(norm_topk_prob=False)),
    _moe(name="softmax in place of sigmoid", plant=operator("expert_affinities", _softmax)),
    _moe(name="shared experts left out", where=("*.mlp", "*.mlp.shared_experts"), plant=_sparse(_without_shared)),
    _moe(
        name="shared experts scaled like the routed ones",
        where=("*.mlp", "*.mlp.shared_experts"),
        plant=_sparse(_shared_scaled),
    ),
    _moe(
        name="one of two shared experts not loaded",
        only="loading",
        where=("*.mlp", "*.mlp.shared_experts", "*.mlp.shared_experts.*"),
        plant=_sparse(_half_of_the_shared),
    ),
    _moe(
        name="router in the serving dtype",
        where=("*.mlp.gate", "*.mlp.router"),
        fp32=False,
        plant=method(_router, "forward", _in_its_own_dtype),
    ),
    _moe(
        name="router of a half-precision product",
        where=("*.mlp.gate", "*.mlp.router"),
        plant=method(_router, "forward", lambda real, self, x: real(self, x.bfloat16().to(x.dtype))),
    ),
)
