"""Checkpoints in and out: the lazy reader, the map between names, the loaders of one rank's share, and the ledger."""

from pilotage.weights.loaders import (
    LazySlice,
    SafetensorsWeightLoader,
    fused_qkv_weight_loader,
    get_weight_loader,
    set_weight_loader,
    sharding_weight_loader,
    with_rank_override,
)

__all__ = [
    "LazySlice",
    "SafetensorsWeightLoader",
    "fused_qkv_weight_loader",
    "get_weight_loader",
    "set_weight_loader",
    "sharding_weight_loader",
    "with_rank_override",
]
