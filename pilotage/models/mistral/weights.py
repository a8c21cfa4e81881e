"""Checkpoint names to parameters: Hugging Face's names are ours."""

from __future__ import annotations

from pilotage.models.common.naming import same_names
from pilotage.models.mistral.config import MistralConfig
from pilotage.weights import WeightMap


def weight_map(config: MistralConfig) -> WeightMap:
    """The WeightMap of a Mistral checkpoint."""
    return same_names(tied=config.tie_word_embeddings, fp8=config.fp8)
