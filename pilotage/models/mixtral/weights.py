"""Checkpoint names to parameters: checkpoints call the block `block_sparse_moe` and hold each expert by itself."""

from __future__ import annotations

from pilotage.models.common.naming import same_names
from pilotage.models.mixtral.config import MixtralConfig
from pilotage.weights import Rename, Stack, WeightMap

_HF, _NATIVE = "model.layers.{i}.block_sparse_moe", "model.layers.{i}.mlp"


def weight_map(config: MixtralConfig) -> WeightMap:
    """The WeightMap of a Mixtral checkpoint: w1 is the gate, w3 the up and w2 the down projection."""
    count, inner = config.num_experts, config.moe_intermediate_size
    gate_up = (f"{_HF}.experts.{{e}}.w1.weight", f"{_HF}.experts.{{e}}.w3.weight")
    return same_names(
        Rename(f"{_HF}.gate.weight", f"{_NATIVE}.gate.weight"),
        Stack(gate_up, f"{_NATIVE}.experts.gate_up_proj", count, (inner, inner)),
        Stack((f"{_HF}.experts.{{e}}.w2.weight",), f"{_NATIVE}.experts.down_proj", count, (config.hidden_size,)),
        tied=config.tie_word_embeddings,
    )
