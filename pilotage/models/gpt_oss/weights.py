"""Checkpoint names to parameters: Hugging Face's names and layouts are ours, experts stacked and inputs first."""

from __future__ import annotations

from pilotage.models.common.naming import same_names
from pilotage.models.gpt_oss.config import GptOssConfig
from pilotage.weights import WeightMap
from pilotage.weights.dequantise import Mxfp4


def weight_map(config: GptOssConfig) -> WeightMap:
    """The WeightMap of a gpt-oss checkpoint; its experts are plain, or MXFP4 as published."""
    names = [f"model.layers.{{i}}.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")] if config.mxfp4 else []
    return same_names(*(Mxfp4(name, name) for name in names), tied=config.tie_word_embeddings)
