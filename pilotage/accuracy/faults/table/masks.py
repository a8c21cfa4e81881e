"""More of attention: what a query sees in one phase, in one layer or in one kind of head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pilotage.accuracy.faults.fault import Fault, Plant, around_attention, attends, loads, sees

HEADS = ("*.self_attn.heads",)
_scale = partial(Fault, heading="Attention scale / softcap / sinks", where=HEADS)
_mask = partial(Fault, heading="Sliding window and masks", where=HEADS)
_heads = partial(Fault, heading="GQA / tensor-parallel layout / fused weights")
_norm = partial(Fault, heading="qk-norm", where=("*.self_attn.q_norm", "*.self_attn.k_norm"))


def _options(change: Callable[[Any, dict[str, Any]], None], phase: str | None = None) -> Plant:
    return attends(lambda layer, meta, options: change(layer, options), phase=phase)


def _bound_without_division(layer: Any, options: dict[str, Any]) -> None:
    """cap * tanh(score), where the score was to be divided by the cap."""
    options["scale"] = options["scale"] * options["softcap"]


def _quarter(layer: Any, options: dict[str, Any]) -> None:
    options["scale"] = options["scale"] * 2.0**0.25


def of_the_last(positions: Tensor, meta: Any) -> Tensor:
    """Every token sees what the last one of its request sees."""
    ends = (meta["query_start_loc"][1:].long() - 1).clamp(min=0)
    last = positions[ends][meta["token_to_req"].long()]
    real = torch.arange(len(positions)) < meta["query_start_loc"][-1]
    return torch.where(real, last, positions)


def _window_everywhere(layer: Any, options: dict[str, Any]) -> None:
    if options["window"] is None:
        options["window"] = 24


def _one_layer_longer(layer: Any, options: dict[str, Any]) -> None:
    if layer.layer_name == "layers.3.self_attn":
        options["window"] += 1


def _a_half(layer: Any, options: dict[str, Any]) -> None:
    """A mask of half precision whose distances are counted in pairs."""
    if options["window"] is not None:
        options["window"] = options["window"] // 4 * 4 + 2


def _of_the_one_before(positions: Tensor, meta: Any) -> Tensor:
    """Strictly before, where it should be up to and with itself; the first token is left as it is."""
    return (positions - 1).clamp(min=0)


def _keys_in_other_heads(real: Any, self: Any, layer: Any, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    return real(self, layer, q, k.roll(1, 1), v, **how)


def _heads_of_the_output(layer: Any) -> None:
    """Output projection's columns as [channel, head] in place of [head, channel]."""
    weight, size = layer.self_attn.o_proj.weight, layer.self_attn.head_size
    turned = weight.unflatten(1, (-1, size)).transpose(1, 2).flatten(1)
    weight.copy_(turned.clone())


def _cut_a_row_late(layer: Any) -> None:
    """A fused projection that is cut one row late: the keys lack their first row and have the values' first."""
    attention = layer.self_attn
    k, v = attention.k_proj.weight, attention.v_proj.weight
    first = v[:1].clone()
    k.copy_(torch.cat((k[1:], first)).clone())


def _first_layers_sinks(model: Any) -> None:
    first = model.model.layers[0].self_attn.sinks.clone()
    for layer in model.model.layers:
        layer.self_attn.sinks.copy_(first)


def _next_layers_norm(model: Any) -> None:
    layers = list(model.model.layers)
    weights = [layer.self_attn.q_norm.weight.clone() for layer in layers]
    for layer, weight in zip(layers, [*weights[1:], weights[0]], strict=True):
        layer.self_attn.q_norm.weight.copy_(weight)


def _large_epsilon(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_norm.eps = layer.self_attn.k_norm.eps = 1e-5


def _mean_of_the_half(model: Any) -> None:
    """The mean square of half a head."""
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.forward = partial(_halved, norm)


def _halved(norm: Any, x: Tensor) -> Tensor:
    half = x[..., : x.shape[-1] // 2].float().square().mean(-1, keepdim=True)
    return norm.weight * (x.float() * torch.rsqrt(half + norm.eps)).to(x.dtype)


def _each(change: Callable[[Any], None]) -> Plant:
    def edit(model: Any) -> None:
        for layer in model.model.layers:
            change(layer)

    return loads(edit)


FAULTS = (
    _norm(
        name="queries normalised with the next layer's weight",
        model="qwen3",
        only="loading",
        plant=loads(_next_layers_norm),
    ),
    _norm(name="epsilon of another model in the heads' norms", model="qwen3_moe", plant=loads(_large_epsilon)),
    _norm(name="mean square of half a head", model="qwen3", plant=loads(_mean_of_the_half)),
    _scale(name="bound of the scores without its division", model="gemma2", plant=_options(_bound_without_division)),
    _scale(
        name="scale a quarter of a power of two off in decode",
        model="llama3",
        only="decode",
        plant=_options(_quarter, "decode"),
    ),
    _scale(
        name="sinks of the first layer in every layer",
        model="gpt_oss",
        only="loading",
        plant=loads(_first_layers_sinks),
    ),
    _mask(
        name="a chunk sees what comes after in it",
        model="llama3",
        only="chunk",
        plant=sees(of_the_last, phase="chunk"),
    ),
    _mask(name="a prompt sees what comes after in it", model="qwen2", plant=sees(of_the_last, phase="prefill")),
    _mask(
        name="full layers get a window in decode",
        model="gemma3",
        only="decode",
        plant=_options(_window_everywhere, "decode"),
    ),
    _mask(name="window one longer in one layer", model="mistral", only="long", plant=_options(_one_layer_longer)),
    _mask(name="window rounded", model="gemma2", only="long", plant=_options(_a_half)),
    _mask(name="a token does not see itself", model="mixtral", plant=sees(_of_the_one_before)),
    _heads(
        name="keys in each other's heads",
        model="qwen3",
        where=(*HEADS, "*.self_attn.kv"),
        plant=around_attention(_keys_in_other_heads),
    ),
    _heads(
        name="output projection by channel, then head",
        model="qwen3",
        only="loading",
        where=("*.self_attn.o_proj",),
        plant=_each(_heads_of_the_output),
    ),
    _heads(
        name="fused projection cut one row late",
        model="mistral",
        only="loading",
        where=("*.self_attn.k_proj",),
        plant=_each(_cut_a_row_late),
    ),
)
