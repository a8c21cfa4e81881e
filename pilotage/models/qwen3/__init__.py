"""Qwen3: dense decoders."""

from pilotage.models.qwen3.config import Qwen3Config
from pilotage.models.qwen3.model import Qwen3ForCausalLM

__all__ = ["Qwen3Config", "Qwen3ForCausalLM"]
