"""Embedding and multipliers, biases, norms, activations, and precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import pilotage.functional as NF
from pilotage.accuracy.faults.fault import Fault, Plant, around_attention, loads, method, operator, reads
from pilotage.core.tap import tap

_scale = partial(Fault, heading="Embedding scale / logit and residual multipliers")
_plain = partial(Fault, heading="Bias / norm / activation")
_number = partial(Fault, heading="Numerics")
NORMS = ("*norm",)


def _backbone() -> Any:
    from pilotage.models.common.blocks import DecoderBackbone

    return DecoderBackbone


def _pre_norm_layer() -> Any:
    from pilotage.models.common.blocks import PreNormDecoderLayer

    return PreNormDecoderLayer


def _gemma2_layer() -> Any:
    from pilotage.models.gemma2.model import Gemma2DecoderLayer

    return Gemma2DecoderLayer


def _rms_norm() -> Any:
    from pilotage.nn import RMSNorm

    return RMSNorm


def _embedding(scale: Callable[[float], float | None]) -> Plant:
    def wrong(real: Any, ids: Tensor, weight: Tensor, *, scale_of: Any = scale, scale: float | None = None) -> Tensor:
        return real(ids, weight, scale=None if scale is None else scale_of(scale))

    return operator("embedding", wrong)


def _unrounded(real: Any, ids: Tensor, weight: Tensor, *, scale: float | None = None) -> Tensor:
    return (F.embedding(ids, weight).float() * (scale or 1.0)).to(weight.dtype)


def _edit(change: Callable[[Any], None]) -> Plant:
    def edit(model: Any) -> None:
        for layer in model.model.layers:
            change(layer)

    return loads(edit)


def _no_bias(*names: str) -> Plant:
    def change(layer: Any) -> None:
        for name in names:
            layer.get_submodule(name).bias.zero_()

    return _edit(change)


def _epsilon(eps: float) -> Plant:
    """An epsilon written into the norm itself."""

    def forward(real: Any, self: Any, x: Tensor) -> Tensor:
        return NF.rms_norm(x, self.weight, eps=eps, unit_offset=self.unit_offset, round_once=self.round_once)

    return method(_rms_norm, "forward", forward)


def _norm(wrong: Callable[..., Tensor]) -> Plant:
    return operator("rms_norm", wrong)


def _plain_weights(real: Any, x: Tensor, weight: Tensor, **how: Any) -> Tensor:
    return real(x, weight, **{**how, "unit_offset": False})


def _in_bf16(real: Any, x: Tensor, weight: Tensor, *, eps: float, **how: Any) -> Tensor:
    small = x.bfloat16()
    normed = small * torch.rsqrt(small.square().mean(-1, keepdim=True) + eps)
    return (weight.bfloat16() * normed).to(x.dtype)


def _rounded_twice(real: Any, x: Tensor, weight: Tensor, **how: Any) -> Tensor:
    return real(x, weight, **{**how, "round_once": False})


def _offset_rounded(
    real: Any, x: Tensor, weight: Tensor, *, eps: float, unit_offset: bool = False, **how: Any
) -> Tensor:
    """One plus the stored weight is added in the serving dtype; in fp32 all is as it should be."""
    if not unit_offset:
        return real(x, weight, eps=eps, **how)
    return real(x, (1 + weight).float(), eps=eps, round_once=True)


def _mean_removed(real: Any, x: Tensor, weight: Tensor, **how: Any) -> Tensor:
    return real(x - x.mean(-1, keepdim=True), weight, **how)


def _no_post_norm(real: Any, self: Any, x: Tensor, rope: Any, ctx: Any) -> Tensor:
    x = tap(f"{self.name}.mid", x + self.self_attn(self.input_layernorm(x), rope, ctx))
    return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


def _post_norm(real: Any, self: Any, x: Tensor, rope: Any, ctx: Any) -> Tensor:
    x = tap(f"{self.name}.mid", self.input_layernorm(x + self.self_attn(x, rope, ctx)))
    return self.post_attention_layernorm(x + self.mlp(x))


def _scaled_residual(real: Any, self: Any, x: Tensor, rope: Any, ctx: Any) -> Tensor:
    x = tap(f"{self.name}.mid", x + 1.02 * self.self_attn(self.input_layernorm(x), rope, ctx))
    return x + self.mlp(self.post_attention_layernorm(x))


def _residual_in_bf16(real: Any, self: Any, x: Tensor, rope: Any, ctx: Any) -> Tensor:
    x = tap(f"{self.name}.mid", (x + self.self_attn(self.input_layernorm(x), rope, ctx)).bfloat16().to(x.dtype))
    return (x + self.mlp(self.post_attention_layernorm(x))).bfloat16().to(x.dtype)


def _exchanged_norms(layer: Any) -> None:
    first, second = layer.input_layernorm, layer.pre_feedforward_layernorm
    a, b = first.weight.clone(), second.weight.clone()
    first.weight.copy_(b)
    second.weight.copy_(a)


def _heads_in_bf16(real: Any, self: Any, layer: Any, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    return real(self, layer, q, k, v, **how).bfloat16().to(q.dtype)


def _clipped(real: Any, self: Any, x: Tensor, *args: Any) -> Tensor:
    """What half precision's largest number does to a wide residual stream, at the scale of a small model."""
    return real(self, x.clamp(-2.5, 2.5), *args)


def _head_in_bf16(real: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return real(x.bfloat16(), weight.bfloat16(), bias).to(x.dtype)


def _normalised_residual(real: Any, self: Any, x: Tensor, rope: Any, ctx: Any) -> Tensor:
    x = tap(f"{self.name}.mid", x + self.self_attn(self.input_layernorm(x), rope, ctx))
    normed = self.post_attention_layernorm(x)
    return normed + self.mlp(normed)


def _parallel_blocks(real: Any, self: Any, x: Tensor, rope: Any, ctx: Any) -> Tensor:
    """Both blocks read the stream before attention, as GPT-J's do."""
    mid = tap(f"{self.name}.mid", x + self.self_attn(self.input_layernorm(x), rope, ctx))
    return mid + self.mlp(self.post_attention_layernorm(x))


def _norm_of_the_sum(real: Any, self: Any, x: Tensor, rope: Any, ctx: Any) -> Tensor:
    x = tap(f"{self.name}.mid", x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rope, ctx)))
    return self.post_feedforward_layernorm(x + self.mlp(self.pre_feedforward_layernorm(x)))


def _outside_the_root(real: Any, self: Any, x: Tensor) -> Tensor:
    """Epsilon added to the root, not under it."""
    wide = x.float()
    normed = wide / (wide.square().mean(-1, keepdim=True).sqrt() + self.eps)
    return (self.weight * normed.to(x.dtype)).to(x.dtype)


def _gate_twice(layer: Any) -> None:
    layer.mlp.up_proj.weight.copy_(layer.mlp.gate_proj.weight.clone())


def _inner_in_bf16(real: Any, *args: Any, **how: Any) -> Tensor:
    return real(*args, **how).bfloat16().to(args[0].dtype)


def _all_in_half(real: Any, x: Tensor, weight: Tensor, *, eps: float, **how: Any) -> Tensor:
    """In the serving dtype the norm itself is computed in it; in fp32 all is as it should be."""
    if x.dtype is torch.float32:
        return real(x, weight, eps=eps, **how)
    mean = (x * x).mean(-1, keepdim=True)
    return weight * (x * torch.rsqrt(mean + eps))


FAULTS = (
    _scale(
        name="embedding scale dropped", model="gemma3", where=("model.embed_tokens",), plant=_embedding(lambda s: None)
    ),
    _scale(
        name="embedding scale of another width",
        model="gemma2",
        where=("model.embed_tokens",),
        plant=_embedding(lambda s: 120**0.5),
    ),
    _scale(
        name="embedding scale not rounded to bf16",
        model="gemma3",
        where=("model.embed_tokens",),
        fp32=False,
        plant=operator("embedding", _unrounded),
    ),
    _scale(
        name="logits scaled by 0.9",
        model="llama3",
        where=("lm_head", "logits"),
        plant=operator("lm_head", lambda real, *args, **how: real(*args, **how) * 0.9),
    ),
    _scale(
        name="attention's residual multiplied by 1.02",
        model="mistral",
        where=("*.mid", "model.layers.[0-9]"),
        plant=method(_pre_norm_layer, "forward", _scaled_residual),
    ),
    _plain(
        name="q, k and v biases not loaded",
        model="qwen2",
        only="loading",
        where=("*.self_attn.[qkv]_proj",),
        plant=_no_bias("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ),
    _plain(
        name="key bias alone not loaded",
        model="gpt_oss",
        only="loading",
        where=("*.self_attn.k_proj",),
        plant=_no_bias("self_attn.k_proj"),
    ),
    _plain(
        name="output projection's bias not loaded",
        model="gpt_oss",
        only="loading",
        where=("*.self_attn.o_proj",),
        plant=_no_bias("self_attn.o_proj"),
    ),
    _plain(name="epsilon 1e-5 read in place of 1e-6", model="gemma3", where=NORMS, plant=reads(norm_eps=1e-5)),
    _plain(name="epsilon 1e-6 written into the code", model="mixtral", where=NORMS, plant=_epsilon(1e-6)),
    _plain(name="norm weights without their +1", model="gemma2", where=NORMS, plant=_norm(_plain_weights)),
    _plain(name="mean removed before the norm", model="llama3", where=NORMS, plant=_norm(_mean_removed)),
    _plain(name="norm in bf16", model="qwen3_moe", where=NORMS, plant=_norm(_in_bf16)),
    _plain(
        name="norm rounded before the weight", model="gpt_oss", where=NORMS, fp32=False, plant=_norm(_rounded_twice)
    ),
    _plain(
        name="one plus the norm's weight rounded to bf16",
        model="gemma3",
        where=NORMS,
        fp32=False,
        plant=_norm(_offset_rounded),
    ),
    _plain(
        name="norm after attention left out",
        model="gemma2",
        where=("*.post_attention_layernorm", "*.mid"),
        plant=method(_gemma2_layer, "forward", _no_post_norm),
    ),
    _plain(
        name="two norms of a layer exchanged",
        model="gemma2",
        only="loading",
        where=("*.input_layernorm", "*.pre_feedforward_layernorm"),
        plant=_edit(_exchanged_norms),
    ),
    _plain(
        name="norms after the blocks in place of before",
        model="llama3",
        where=("*.input_layernorm", "*.post_attention_layernorm", "*.mid"),
        plant=method(_pre_norm_layer, "forward", _post_norm),
    ),
    _plain(name="exact gelu in place of tanh", model="gemma3", where=("*.mlp",), plant=reads(activation="gelu")),
    _plain(name="SiLU in place of gelu", model="gemma2", where=("*.mlp",), plant=reads(activation="silu")),
    _plain(name="ReLU in place of SiLU", model="mistral", where=("*.mlp",), plant=reads(activation="relu")),
    _plain(name="gate in the place of up", model="gemma2", where=("*.mlp", "*.mlp.up_proj"), plant=_edit(_gate_twice)),
    _plain(
        name="epsilon outside of the root",
        model="mistral",
        where=NORMS,
        plant=method(_rms_norm, "forward", _outside_the_root),
    ),
    _plain(
        name="last norm of a layer over the sum",
        model="gemma2",
        where=("*.post_feedforward_layernorm", "model.layers.[0-9]"),
        plant=method(_gemma2_layer, "forward", _norm_of_the_sum),
    ),
    _scale(
        name="second residual from the normalised stream",
        model="qwen3",
        where=("model.layers.[0-9]",),
        plant=method(_pre_norm_layer, "forward", _normalised_residual),
    ),
    _scale(
        name="both blocks on the same stream",
        model="llama3",
        where=("model.layers.[0-9]", "*.post_attention_layernorm"),
        plant=method(_pre_norm_layer, "forward", _parallel_blocks),
    ),
    _number(
        name="norm computed in the serving dtype",
        model="qwen2",
        where=NORMS,
        fp32=False,
        plant=operator("rms_norm", _all_in_half),
    ),
    _number(
        name="MLP's result in bf16",
        model="mistral",
        where=("*.mlp",),
        plant=operator("mlp", _inner_in_bf16),
    ),
    _number(
        name="attention's result rounded to bf16",
        model="qwen2",
        where=("*.self_attn.heads",),
        plant=around_attention(_heads_in_bf16),
    ),
    _number(
        name="residual stream kept in bf16",
        model="llama3",
        where=("*.mid", "model.layers.[0-9]"),
        plant=method(_pre_norm_layer, "forward", _residual_in_bf16),
    ),
    _number(
        name="large activations clipped",
        model="qwen3",
        where=("model.layers.[0-9]", "*.input_layernorm", "*.mid"),
        plant=method(_pre_norm_layer, "forward", _clipped),
    ),
    _number(
        name="head computed in bf16",
        model="qwen3",
        where=("lm_head", "logits"),
        plant=operator("lm_head", _head_in_bf16),
    ),
)
