"""Gemma 2: text decoders."""

from pilotage.models.gemma2.config import Gemma2Config
from pilotage.models.gemma2.model import Gemma2ForCausalLM

__all__ = ["Gemma2Config", "Gemma2ForCausalLM"]
