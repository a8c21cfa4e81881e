"""Layers that differ in their heads, attend to another layer's keys and get inputs of their own: Gemma 4."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import pilotage.functional as NF
from pilotage.accuracy.faults.fault import Fault, Patch, Plant, attends, kind_of, loads, method, reads

_model = partial(Fault, model="gemma4")
HEADS = ("*.self_attn.heads",)
ROPE = ("*.self_attn.q_rope", "*.self_attn.k_rope")
CACHE = (*HEADS, "*.self_attn.kv")
# What the layers' own inputs go through; what makes them has sites of its own.
OWN_INPUT = ("*.per_layer_projection", "*.post_per_layer_input_norm")
_rope = partial(_model, heading="RoPE", where=ROPE)
_keys = partial(_model, heading="GQA / tensor-parallel layout / fused weights", where=CACHE)
_input = partial(_model, heading="Embedding scale / logit and residual multipliers")


def _config() -> Any:
    from pilotage.models.gemma4.config import Gemma4Config

    return Gemma4Config


def _attention() -> Any:
    from pilotage.models.gemma4.model import Gemma4Attention

    return Gemma4Attention


def _backbone() -> Any:
    from pilotage.models.gemma4.model import Gemma4Backbone

    return Gemma4Backbone


def _reads(change: Callable[[Any], dict[str, Any]]) -> Plant:
    """Make the model read its config wrongly; its rotary tables are made after the common fields."""

    def plant(patch: Patch) -> None:
        owner = _config()
        real = owner.__dict__["from_configs"].__func__

        def from_configs(cls: Any, *args: Any, **how: Any) -> Any:
            config = real(cls, *args, **how)
            return dataclasses.replace(config, **change(config))

        patch.set(owner, "from_configs", classmethod(from_configs))

    return plant


def _full_rope(**values: Any) -> Plant:
    """Other frequencies for the layers of full attention, whose heads are the larger ones."""

    def change(config: Any) -> dict[str, Any]:
        return {"rope": {**config.rope, "full_attention": NF.rope_frequencies(head_size=40, **values)}}

    return _reads(change)


def _each(change: Callable[[Any], None]) -> Plant:
    def edit(model: Any) -> None:
        for layer in model.model.layers:
            change(layer)

    return loads(edit)


def _scaled(layer: Any) -> None:
    layer.self_attn.scale = layer.self_attn.head_size**-0.5


def _first_of_its_kind(real: Any, self: Any, layer_idx: int) -> int | None:
    return real(self, layer_idx) if layer_idx < 5 else self.layer_types.index(self.layer_types[layer_idx])


def _module() -> Any:
    from pilotage.models.gemma4 import model

    return model


def _values_as_projected(patch: Patch) -> None:
    patch.set(_module(), "_plain_norm", lambda x, eps: x)


def _values_are_keys(layer: Any, meta: dict[str, Any], options: dict[str, Any]) -> None:
    """Values taken from the finished keys in place of the projected ones."""
    if layer.window is None and getattr(layer, "kv_source", None) is None:
        options["v"] = options["k"]


def _no_window_where_shared(layer: Any, meta: dict[str, Any], options: dict[str, Any]) -> None:
    if layer.kv_source is not None:
        options["window"] = None


def _no_scalar(layer: Any) -> None:
    layer.layer_scalar.fill_(1.0)


def _layer_before(real: Any, self: Any, x: Tensor, input_ids: Tensor) -> Tensor:
    return real(self, x, input_ids).roll(1, -2)


def _tokens_alone(real: Any, self: Any, x: Tensor, input_ids: Tensor) -> Tensor:
    return real(self, torch.zeros_like(x), input_ids)


def _no_own_input(real: Any, self: Any, x: Tensor, input_ids: Tensor) -> Tensor:
    return torch.ones_like(real(self, x, input_ids))


def _unscaled(model: Any) -> None:
    model.model.embed_tokens_per_layer.scale = None


def _no_input_norm(model: Any) -> None:
    model.model.per_layer_projection_norm.forward = lambda x: x


def _narrow(layer: Any) -> None:
    """Half of a double-wide block left at zero."""
    weight = layer.mlp.down_proj.weight
    if weight.shape[1] > 120:
        weight[:, weight.shape[1] // 2 :] = 0


def _stale_shared_pages(real: Any, self: Any, layer: Any, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """Layers that share read pages of zeros in decode: their own, which nobody writes."""
    if layer.kv_source is None or kind_of(self, layer.kv_source) != "decode":
        return real(self, layer, q, k, v, **how)
    pages = layer.kv_cache
    layer.kv_cache = tuple(torch.zeros_like(page) for page in pages)
    try:
        return real(self, layer, q, k, v, **how)
    finally:
        layer.kv_cache = pages


def _context() -> Any:
    from pilotage.models.common.context import PagedContext

    return PagedContext


FAULTS = (
    _model(
        name="scores scaled by the head size",
        heading="Attention scale / softcap / sinks",
        where=HEADS,
        plant=_each(_scaled),
    ),
    _model(
        name="bound of the logits dropped",
        heading="Attention scale / softcap / sinks",
        where=("lm_head", "logits"),
        plant=reads(logit_softcap=None),
    ),
    _rope(
        name="frequencies laid out over the rotated quarter",
        plant=_full_rope(theta=1e6, partial_rotary_factor=0.25),
    ),
    _rope(name="whole head rotated in full layers", plant=_full_rope(theta=1e6)),
    _rope(
        name="base of the sliding layers in the full ones",
        plant=_full_rope(theta=20000.0, kind="proportional", partial_rotary_factor=0.25),
    ),
    _keys(name="keys of the first layer of the kind", plant=method(_config, "kv_source", _first_of_its_kind)),
    _keys(name="values not normalised", where=("*.self_attn.v_norm",), plant=_values_as_projected),
    _keys(name="values taken from the rotated keys", plant=attends(_values_are_keys)),
    _model(
        name="layers that share read pages that nobody writes",
        heading="KV cache, buckets, graphs",
        only="decode",
        where=CACHE,
        plant=method(_context, "attend", _stale_shared_pages),
    ),
    _model(
        name="no window where keys are shared",
        heading="Sliding window and masks",
        only="long",
        where=HEADS,
        plant=attends(_no_window_where_shared),
    ),
    _input(
        name="scalar of the layers not loaded", only="loading", where=("model.layers.[0-9]",), plant=_each(_no_scalar)
    ),
    _input(
        name="inputs of the layer before", where=OWN_INPUT, plant=method(_backbone, "per_layer_inputs", _layer_before)
    ),
    _input(
        name="inputs of the layers from tokens alone",
        where=(*OWN_INPUT, "model.per_layer_*"),
        plant=method(_backbone, "per_layer_inputs", _tokens_alone),
    ),
    _input(name="no inputs of the layers", where=OWN_INPUT, plant=method(_backbone, "per_layer_inputs", _no_own_input)),
    _input(
        name="embedding of the layers' inputs not scaled",
        where=("model.embed_tokens_per_layer", *OWN_INPUT),
        plant=loads(_unscaled),
    ),
    _model(
        name="norm of the layers' inputs left out",
        heading="Bias / norm / activation",
        where=("model.per_layer_projection_norm",),
        plant=loads(_no_input_norm),
    ),
    _model(
        name="half of the wide blocks not loaded",
        heading="Loading, adapters, config",
        only="loading",
        where=("*.mlp", "*.mlp.*"),
        plant=_each(_narrow),
    ),
)
