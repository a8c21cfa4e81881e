"""Checkpoint names to parameters: Hugging Face's names and layouts are ours, experts stacked and inputs first."""

from __future__ import annotations

from pilotage.models.common.naming import same_names
from pilotage.models.gpt_oss.config import GptOssConfig
from pilotage.weights import WeightMap


def weight_map(config: GptOssConfig) -> WeightMap:
    """The WeightMap of a gpt-oss checkpoint that is not quantised."""
    return same_names(tied=config.tie_word_embeddings)
