"""The scales of an 8-bit key/value cache: found in the checkpoint, or 1 where the user wants a cache without them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pilotage.core.errors import ConfigError, Unsupported, WeightError
from pilotage.functional import KV_8BIT
from pilotage.models.common.naming import KV_SCALES
from pilotage.weights import SafetensorsCheckpoint

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import VllmConfig

CACHE_DTYPES = ("fp8", "fp8_e4m3")  # vLLM's names of what is implemented here


def requested(vllm_config: VllmConfig) -> bool:
    """Whether keys and values shall be 8-bit floats."""
    return vllm_config.cache_config.cache_dtype in CACHE_DTYPES


def require_supported(vllm_config: VllmConfig) -> None:
    """Raise where `kv_cache_dtype` asks for something else than the weights' dtype or 8-bit floats with scales.

    Raises:
        Unsupported: another format, or layers that are left out.
    """
    cache, where = vllm_config.cache_config, "kv_cache_dtype"
    plain = ("auto", str(vllm_config.model_config.dtype).removeprefix("torch."))
    if cache.cache_dtype not in (*plain, *CACHE_DTYPES):
        raise Unsupported(
            f"kv_cache_dtype={cache.cache_dtype!r} is not implemented on this target",
            where=where,
            do="use auto, or fp8 for a checkpoint with k_scale and v_scale",
        )
    if cache.kv_cache_dtype_skip_layers:
        raise Unsupported(
            f"kv_cache_dtype_skip_layers={cache.kv_cache_dtype_skip_layers} is not implemented on this target",
            where=where,
            do="remove it",
        )


def require_package(vllm_config: VllmConfig) -> None:
    """Refuse 8-bit keys and values of a model whose attention is not ours.

    Raises:
        Unsupported: they were asked for.
    """
    if requested(vllm_config):
        raise Unsupported(
            f"{', '.join(vllm_config.model_config.architectures)} has no model package: its keys and values cannot be "
            "cached as 8-bit floats",
            where="kv_cache_dtype",
            do="use kv_cache_dtype=auto, or port the model with `pilotage new`",
        )


def attach(model: Any, checkpoint: Path, *, unscaled: bool) -> None:
    """Make a model cache 8-bit floats: give every attention layer its scales.

    Args:
        model: built and loaded; a `models.common.CausalLM`.
        checkpoint: its directory; read for the scales.
        unscaled: take 1 where the checkpoint has no scales at all.

    Raises:
        Unsupported: the model's attention does not take such a cache.
        ConfigError: no scales, and `unscaled` is not set.
        WeightError: scales for some layers only, or one that is no positive number.
    """
    if not getattr(model, "serves_8bit_cache", False):
        raise Unsupported(
            f"{type(model).__name__} does not cache 8-bit floats", where="kv_cache_dtype", do="use kv_cache_dtype=auto"
        )
    layers = {layer.layer_name: layer for layer in model.attention_layers()}
    found = read(checkpoint, {name: layer.name for name, layer in layers.items()})
    if not found and not unscaled:
        raise ConfigError(
            "the checkpoint has no scales of keys and values (k_scale, v_scale): 8-bit floats would be wrong by an "
            "unknown amount",
            where=f"kv_cache_dtype, {checkpoint}",
            do='use kv_cache_dtype=auto, or state {"pilotage": {"unscaled_fp8_kv_cache": true}} to store them with '
            "scale 1.0",
        )
    for module in (layer.self_attn for layer in model.model.layers):
        owner = getattr(module, "kv_source", None) or module.layer_name
        for kind in "kv":
            value = found[owner, kind] if found else 1.0
            module.register_buffer(f"{kind}_scale", torch.tensor(value, dtype=torch.float32), persistent=False)
    model.kv_cache_dtype = KV_8BIT


def of(model: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the scales of keys and of values by layer; nothing of a model that caches what it computes."""
    if getattr(model, "kv_cache_dtype", None) != KV_8BIT:
        return {}
    return {layer.layer_name: (layer.k_scale, layer.v_scale) for layer in model.attention_layers()}


def read(checkpoint: Path, layers: Mapping[str, str]) -> dict[tuple[str, str], float]:
    """Read the scales of keys ("k") and values ("v") of every layer; nothing where the checkpoint has none.

    Args:
        checkpoint: its directory.
        layers: a layer's name -> its attention module's in the checkpoint, e.g. "model.layers.0.self_attn".

    Raises:
        WeightError: see `attach`.
    """
    tensors = SafetensorsCheckpoint(checkpoint).tensors
    found: dict[tuple[str, str], float] = {}
    lacking = []
    for layer, module in layers.items():
        for kind in "kv":
            names = [name for ending in KV_SCALES[kind] if (name := f"{module}.{ending}") in tensors]
            if not names:
                lacking.append(f"{module}.{KV_SCALES[kind][0]}")
                continue
            found[layer, kind] = _positive(names[0], tensors[names[0]][...])
    if found and lacking:
        raise WeightError(
            f"{len(lacking)} scales are missing, {len(found)} are there", where=lacking[0], do="fetch the checkpoint"
        )
    return found


def _positive(name: str, scale: Tensor) -> float:
    if scale.numel() != 1:
        raise WeightError(f"{list(scale.shape)} scales; one a layer is implemented", where=name)
    value = float(scale.float().reshape(()))
    if not 0 < value < float("inf"):
        raise WeightError(f"{value} is no scale", where=name, do="fetch the checkpoint again")
    return value
