"""Query/key norms, attention's scale, bounds and sinks, its masks, and the grouping of heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import pilotage.functional as NF
from pilotage.accuracy.faults.fault import Fault, Plant, around_attention, attends, loads, method, reads

HEADS = ("*.self_attn.heads",)
_norm = partial(Fault, heading="qk-norm", where=("*.self_attn.q_norm", "*.self_attn.k_norm"))
_scale = partial(Fault, heading="Attention scale / softcap / sinks", where=HEADS)
_mask = partial(Fault, heading="Sliding window and masks", where=HEADS)
_heads = partial(Fault, heading="GQA / tensor-parallel layout / fused weights")


def qwen3_attention() -> Any:
    from pilotage.models.qwen3.model import Qwen3Attention

    return Qwen3Attention


def _no_norm(real: Any, self: Any, x: Tensor, rope: Any, ctx: Any) -> Tensor:
    q, k, v = self.qkv(x)
    q, k = NF.rotary(q, k, *rope)
    return self.attend(q, k, v, ctx)


def _norm_after_rope(real: Any, self: Any, x: Tensor, rope: Any, ctx: Any) -> Tensor:
    q, k, v = self.qkv(x)
    q, k = NF.rotary(q, k, *rope)
    return self.attend(self.q_norm(q), self.k_norm(k), v, ctx)


def _over_all_heads(model: Any) -> None:
    """Mean square over all heads of a token, not of each."""
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.forward = partial(_joint, norm)


def _joint(norm: Any, x: Tensor) -> Tensor:
    flat = x.float()
    flat = flat * torch.rsqrt(flat.square().mean((-2, -1), keepdim=True) + norm.eps)
    return norm.weight * flat.to(x.dtype)


def _exchanged_norms(model: Any) -> None:
    for layer in model.model.layers:
        q, k = layer.self_attn.q_norm.weight, layer.self_attn.k_norm.weight
        q.data, k.data = k.data.clone(), q.data.clone()


def _plain_qk_norm(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_norm.unit_offset = layer.self_attn.k_norm.unit_offset = False


def _one_norm(model: Any) -> None:
    model.model.layers[2].self_attn.k_norm.weight.fill_(1.0)


def _set(phase: str | None = None, **values: Any) -> Plant:
    """Give attention other options; a callable is given the right one."""

    def change(layer: Any, meta: dict[str, Any], options: dict[str, Any]) -> None:
        for name, value in values.items():
            if options[name] is not None:
                options[name] = value(options[name]) if callable(value) else value

    return attends(change, phase=phase)


def _sinks_as_keys(layer: Any, meta: dict[str, Any], options: dict[str, Any]) -> None:
    options["sinks"] = options["sinks"] * layer.scale


def _inverted(config: Any) -> tuple[str, ...]:
    other = {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}
    return tuple(other[kind] for kind in config.layer_types)


def _shifted(config: Any) -> tuple[str, ...]:
    return (*config.layer_types[1:], config.layer_types[0])


def _local_window(layer: Any, meta: dict[str, Any], options: dict[str, Any]) -> None:
    """The window of a chunk begins at the chunk's own start."""
    if options["window"] is not None:
        options["window"] = options["window"] // 2


def _interleaved_groups(real: Any, self: Any, layer: Any, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    order = [n for kv in range(k.shape[1]) for n in range(kv, q.shape[1], k.shape[1])]
    back = torch.tensor(order).argsort()
    return real(self, layer, q[:, order], k, v, **how)[:, back]


def _first_kv_head(real: Any, self: Any, layer: Any, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    return real(self, layer, q, k, v[:, :1].expand_as(v).contiguous(), **how)


def _edit(change: Callable[[Any], None], layers: slice = slice(None)) -> Plant:
    def edit(model: Any) -> None:
        for layer in model.model.layers[layers]:
            change(layer)

    return loads(edit)


def _interleave_rows(layer: Any) -> None:
    """What an unpermuted checkpoint of the interleaved layout looks like."""
    size = layer.self_attn.head_size
    for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj):
        rows = linear.weight.view(-1, 2, size // 2, linear.weight.shape[1]).transpose(1, 2)
        linear.weight.copy_(rows.reshape(linear.weight.shape).clone())


def _permuted_output(layer: Any) -> None:
    weight, size = layer.self_attn.o_proj.weight, layer.self_attn.head_size
    heads = weight.view(weight.shape[0], -1, size)
    weight.copy_(torch.cat((heads[:, [1, 0]], heads[:, 2:]), 1).reshape(weight.shape).clone())


def _exchanged(first: str, second: str) -> Callable[[Any], None]:
    def change(layer: Any) -> None:
        a, b = layer.get_submodule(first).weight, layer.get_submodule(second).weight
        a_values, b_values = a.clone(), b.clone()
        a.copy_(b_values)
        b.copy_(a_values)

    return change


def _alternating(layer: Any) -> None:
    """[gate; up] of the checkpoint read as rows that alternate."""
    experts = getattr(layer.mlp, "experts", None)
    if experts is not None:
        experts.interleaved = True


FAULTS = (
    _norm(name="weights without their +1", model="gemma3", plant=loads(_plain_qk_norm)),
    _norm(
        name="left out",
        model="qwen3",
        where=("*.self_attn.[qk]_norm", "*.self_attn.[qk]_rope"),
        plant=method(qwen3_attention, "forward", _no_norm),
    ),
    _norm(
        name="after RoPE in place of before it",
        model="qwen3_moe",
        where=("*.self_attn.[qk]_norm", "*.self_attn.[qk]_rope"),
        plant=method(qwen3_attention, "forward", _norm_after_rope),
    ),
    _norm(name="over all heads at once", model="qwen3", plant=loads(_over_all_heads)),
    _norm(name="weights of q and k exchanged", model="gemma3", only="loading", plant=loads(_exchanged_norms)),
    _norm(name="one layer's key norm not loaded", model="qwen3_moe", only="loading", plant=loads(_one_norm)),
    _scale(name="head size in place of query_pre_attn_scalar", model="gemma3", plant=reads(attn_scale=20**-0.5)),
    _scale(name="hidden size over heads in place of the head size", model="mistral", plant=reads(attn_scale=10**-0.5)),
    _scale(name="scale 2% off", model="qwen2", plant=reads(attn_scale=lambda config: config.attn_scale * 1.02)),
    _scale(name="bound of the scores dropped", model="gemma2", plant=reads(attn_softcap=None)),
    _scale(
        name="bound of the scores dropped in decode", model="gemma2", only="decode", plant=_set("decode", softcap=None)
    ),
    _scale(
        name="published bound of the scores in place of the config's", model="gemma2", plant=reads(attn_softcap=50.0)
    ),
    _scale(
        name="bound of the logits dropped", model="gemma2", where=("lm_head", "logits"), plant=reads(logit_softcap=None)
    ),
    _scale(name="sinks dropped", model="gpt_oss", plant=_set(sinks=None)),
    _scale(name="sinks dropped in decode", model="gpt_oss", only="decode", plant=_set("decode", sinks=None)),
    _scale(name="sinks scaled like scores", model="gpt_oss", plant=attends(_sinks_as_keys)),
    _mask(name="window one longer", model="gemma3", only="long", plant=reads(sliding_window=17)),
    _mask(name="window one shorter", model="mistral", only="long", plant=reads(sliding_window=15)),
    _mask(name="no window given to attention", model="gpt_oss", only="long", plant=_set(window=None)),
    _mask(name="pattern of layers inverted", model="gemma2", only="long", plant=reads(layer_types=_inverted)),
    _mask(
        name="pattern of layers one off",
        model="gemma3",
        only="long",
        where=(*HEADS, "*.self_attn.[qk]_rope"),
        plant=reads(layer_types=_shifted),
    ),
    _mask(name="window dropped in later chunks", model="gemma3", only="chunk", plant=_set("chunk", window=None)),
    _mask(
        name="window one longer in decode", model="mistral", only="decode", plant=_set("decode", window=lambda w: w + 1)
    ),
    _mask(
        name="window halved in later chunks", model="gemma2", only="chunk", plant=attends(_local_window, phase="chunk")
    ),
    _heads(
        name="query heads grouped by turns", model="llama3", where=HEADS, plant=around_attention(_interleaved_groups)
    ),
    _heads(
        name="every head reads the first value head",
        model="qwen2",
        where=(*HEADS, "*.kv"),
        plant=around_attention(_first_kv_head),
    ),
    _heads(
        name="interleaved checkpoint not permuted",
        model="llama3",
        only="loading",
        where=("*.self_attn.q_proj", "*.self_attn.k_proj"),
        plant=_edit(_interleave_rows),
    ),
    _heads(
        name="two heads exchanged in the output projection",
        model="mixtral",
        only="loading",
        where=("*.self_attn.o_proj",),
        plant=_edit(_permuted_output, slice(1, 2)),
    ),
    _heads(
        name="keys and values exchanged in one layer",
        model="gemma3",
        only="loading",
        where=("*.self_attn.[kv]_proj",),
        plant=_edit(_exchanged("self_attn.k_proj", "self_attn.v_proj"), slice(2, 3)),
    ),
    _heads(
        name="gate and up exchanged",
        model="qwen2",
        only="loading",
        where=("*.mlp",),
        plant=_edit(_exchanged("mlp.gate_proj", "mlp.up_proj")),
    ),
    _heads(
        name="fused gate and up read as alternating",
        model="qwen3_moe",
        where=("*.mlp.experts",),
        plant=_edit(_alternating),
    ),
)
