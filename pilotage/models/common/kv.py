"""What a model asks of the key/value cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerSpec:
    """The cache of one attention layer.

    Attributes:
        name: address of the layer, e.g. "layers.0.self_attn"; the key of its pages and of its metadata.
        num_kv_heads: on this rank.
        head_size: H.
        dtype: of keys and values.
        sliding_window: keys that a query sees, itself included; None for all.
        one_row: keys and values are one and the same row, which is held once.
    """

    name: str
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    sliding_window: int | None = None
    one_row: bool = False

    def pages(
        self, count: int, block_size: int, *, fill: float = 0.0, device: torch.device | None = None
    ) -> list[Tensor]:
        """Make pages of keys and of values, each [count, K, block_size, H]; twice the same where a row is both."""
        shape = (count, self.num_kv_heads, block_size, self.head_size)
        keys = torch.full(shape, fill, dtype=self.dtype, device=device)
        return [keys, keys if self.one_row else torch.full(shape, fill, dtype=self.dtype, device=device)]


@dataclass(frozen=True)
class KVSpec:
    """The caches of a model, in layer order. Pages of a layer are [P, K, C, H] (HND)."""

    layers: list[LayerSpec]
