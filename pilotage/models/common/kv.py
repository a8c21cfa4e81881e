"""What a model asks of the key/value cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerSpec:
    """The cache of one attention layer.

    Attributes:
        name: address of the layer, e.g. "layers.0.self_attn"; the key of its pages and of its metadata.
        num_kv_heads: on this rank.
        head_size: H.
        dtype: of keys and values.
        sliding_window: keys that a query sees, itself included; None for all.
    """

    name: str
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    sliding_window: int | None = None


@dataclass(frozen=True)
class KVSpec:
    """The caches of a model, in layer order. Pages of a layer are [P, K, C, H] (HND)."""

    layers: list[LayerSpec]
