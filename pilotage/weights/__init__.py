"""Checkpoints in and out: the lazy reader, the map between names, the loaders of one rank's share, and the ledger."""

from pilotage.weights.adapter import StateDictAdapter
from pilotage.weights.checkpoint import LoadResult, SafetensorsCheckpoint
from pilotage.weights.expert_loaders import (
    expert_parallel_grouped_loader,
    expert_parallel_interleaved_loader,
    expert_parallel_tensor_dim_loader,
)
from pilotage.weights.lazy import LazyTensor
from pilotage.weights.ledger import Ledger
from pilotage.weights.load import load_into
from pilotage.weights.loaders import (
    LazySlice,
    SafetensorsWeightLoader,
    fused_qkv_weight_loader,
    get_weight_loader,
    keep_dtype,
    padded_sharding_weight_loader,
    set_weight_loader,
    sharding_weight_loader,
    with_rank_override,
)
from pilotage.weights.map import Plan, Problem, WeightMap
from pilotage.weights.rules import Drop, Fuse, Identity, Permute, Rename, Split, Stack, Tie, Transpose

__all__ = [
    "Drop",
    "Fuse",
    "Identity",
    "LazySlice",
    "LazyTensor",
    "Ledger",
    "LoadResult",
    "Permute",
    "Plan",
    "Problem",
    "Rename",
    "SafetensorsCheckpoint",
    "SafetensorsWeightLoader",
    "Split",
    "Stack",
    "StateDictAdapter",
    "Tie",
    "Transpose",
    "WeightMap",
    "expert_parallel_grouped_loader",
    "expert_parallel_interleaved_loader",
    "expert_parallel_tensor_dim_loader",
    "fused_qkv_weight_loader",
    "get_weight_loader",
    "keep_dtype",
    "load_into",
    "padded_sharding_weight_loader",
    "set_weight_loader",
    "sharding_weight_loader",
    "with_rank_override",
]
