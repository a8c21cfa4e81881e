"""Checkpoint names to parameters: experts are stacked, and the layers that predict further tokens are left out."""

from __future__ import annotations

from pilotage.models.common.naming import same_names
from pilotage.models.deepseek_v3.config import DeepseekV3Config
from pilotage.weights import Drop, Stack, WeightMap

_EXPERT, _EXPERTS = "model.layers.{i}.mlp.experts.{e}", "model.layers.{i}.mlp.experts"


def weight_map(config: DeepseekV3Config) -> WeightMap:
    """The WeightMap of a DeepSeek-V3 checkpoint."""
    count, inner = config.num_experts, config.moe_intermediate_size
    gate_up = (f"{_EXPERT}.gate_proj.weight", f"{_EXPERT}.up_proj.weight")
    after = range(config.num_layers, config.num_layers + config.num_mtp_layers)
    return same_names(
        *(Drop(f"model.layers.{i}.{{*rest}}", "predicts a further token; not served", first=True) for i in after),
        Stack(gate_up, f"{_EXPERTS}.gate_up_proj", count, (inner, inner)),
        Stack((f"{_EXPERT}.down_proj.weight",), f"{_EXPERTS}.down_proj", count, (config.hidden_size,)),
        tied=config.tie_word_embeddings,
    )
