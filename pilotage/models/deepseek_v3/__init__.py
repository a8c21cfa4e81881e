"""DeepSeek-V3: latent attention, experts chosen by groups."""

from pilotage.models.deepseek_v3.config import DeepseekV3Config
from pilotage.models.deepseek_v3.model import DeepseekV3ForCausalLM

__all__ = ["DeepseekV3Config", "DeepseekV3ForCausalLM"]
