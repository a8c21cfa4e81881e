"""Checkpoint names to parameters: Hugging Face's names are ours."""

from __future__ import annotations

from pilotage.models.common.naming import same_names
from pilotage.models.gemma3.config import Gemma3Config
from pilotage.weights import WeightMap


def weight_map(config: Gemma3Config) -> WeightMap:
    """The WeightMap of a Gemma 3 checkpoint."""
    return same_names(tied=config.tie_word_embeddings, fp8=config.fp8)
