"""Qwen3 with experts: sparse decoders."""

from pilotage.models.qwen3_moe.config import Qwen3MoeConfig
from pilotage.models.qwen3_moe.model import Qwen3MoeForCausalLM

__all__ = ["Qwen3MoeConfig", "Qwen3MoeForCausalLM"]
