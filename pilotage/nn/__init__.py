"""Modules that hold one rank's weights and keep their communication to themselves."""

from pilotage.nn.embedding import VocabDimShardedEmbedding
from pilotage.nn.experts import Experts, Router
from pilotage.nn.linear import ColumnParallelLinear, LMHead, ReplicatedLinear, RowParallelLinear
from pilotage.nn.norm import RMSNorm
from pilotage.nn.packing import gated_mlp, pack, project, unpack

__all__ = [
    "ColumnParallelLinear",
    "Experts",
    "LMHead",
    "RMSNorm",
    "ReplicatedLinear",
    "Router",
    "RowParallelLinear",
    "VocabDimShardedEmbedding",
    "gated_mlp",
    "pack",
    "project",
    "unpack",
]
