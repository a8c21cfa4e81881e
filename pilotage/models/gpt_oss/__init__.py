"""gpt-oss: sparse decoders with attention sinks."""

from pilotage.models.gpt_oss.config import GptOssConfig
from pilotage.models.gpt_oss.model import GptOssForCausalLM

__all__ = ["GptOssConfig", "GptOssForCausalLM"]
