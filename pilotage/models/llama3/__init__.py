"""Llama 3, 3.1, 3.2 and 3.3: dense decoders."""

from pilotage.models.llama3.config import Llama3Config
from pilotage.models.llama3.model import LlamaForCausalLM

__all__ = ["Llama3Config", "LlamaForCausalLM"]
