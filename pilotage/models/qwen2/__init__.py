"""Qwen2 and Qwen2.5: dense decoders."""

from pilotage.models.qwen2.config import Qwen2Config
from pilotage.models.qwen2.model import Qwen2ForCausalLM

__all__ = ["Qwen2Config", "Qwen2ForCausalLM"]
