"""Checkpoint names to parameters: checkpoints hold each expert by itself, the model holds them stacked."""

from __future__ import annotations

from pilotage.models.common.naming import same_names
from pilotage.models.qwen3_moe.config import Qwen3MoeConfig
from pilotage.weights import Stack, WeightMap

_EXPERT, _EXPERTS = "model.layers.{i}.mlp.experts.{e}", "model.layers.{i}.mlp.experts"


def weight_map(config: Qwen3MoeConfig) -> WeightMap:
    """The WeightMap of a Qwen3-MoE checkpoint."""
    count, inner = config.num_experts, config.moe_intermediate_size
    stack = config.fp8.stack if config.fp8 is not None else Stack
    gate_up = (f"{_EXPERT}.gate_proj.weight", f"{_EXPERT}.up_proj.weight")
    return same_names(
        stack(gate_up, f"{_EXPERTS}.gate_up_proj", count, (inner, inner)),
        stack((f"{_EXPERT}.down_proj.weight",), f"{_EXPERTS}.down_proj", count, (config.hidden_size,)),
        tied=config.tie_word_embeddings,
        fp8=config.fp8,
    )
