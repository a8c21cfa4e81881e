"""Gemma 3: text decoders."""

from pilotage.models.gemma3.config import Gemma3Config
from pilotage.models.gemma3.model import Gemma3ForCausalLM

__all__ = ["Gemma3Config", "Gemma3ForCausalLM"]
