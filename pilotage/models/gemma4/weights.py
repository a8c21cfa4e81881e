"""Checkpoint names to parameters: Hugging Face's names are ours."""

from __future__ import annotations

from pilotage.models.common.naming import same_names
from pilotage.models.gemma4.config import Gemma4Config
from pilotage.weights import Drop, WeightMap

_UNUSED = "a layer that shares the keys and values of an earlier one makes none"


def weight_map(config: Gemma4Config) -> WeightMap:
    """The WeightMap of a Gemma 4 text checkpoint."""
    shared = [layer for layer in range(config.num_layers) if config.kv_source(layer) != layer]
    names = ("k_proj", "v_proj", "k_norm", "v_norm")
    drops = [
        Drop(f"model.layers.{layer}.self_attn.{name}.{{*rest}}", _UNUSED, first=True)
        for layer in shared
        for name in names
    ]
    return same_names(*drops, tied=config.tie_word_embeddings)
