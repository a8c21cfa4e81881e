"""Gemma 4: text decoders."""

from pilotage.models.gemma4.config import Gemma4Config
from pilotage.models.gemma4.model import Gemma4ForCausalLM

__all__ = ["Gemma4Config", "Gemma4ForCausalLM"]
