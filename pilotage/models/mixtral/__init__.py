"""Mixtral: sparse decoders."""

from pilotage.models.mixtral.config import MixtralConfig
from pilotage.models.mixtral.model import MixtralForCausalLM

__all__ = ["MixtralConfig", "MixtralForCausalLM"]
