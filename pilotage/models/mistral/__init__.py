"""Mistral: dense decoders."""

from pilotage.models.mistral.config import MistralConfig
from pilotage.models.mistral.model import MistralForCausalLM

__all__ = ["MistralConfig", "MistralForCausalLM"]
