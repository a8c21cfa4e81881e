"""The class given to vLLM's model registry."""

from __future__ import annotations

from pilotage.models.common.factory import ServedByVllm
from pilotage.models.deepseek_v3 import model


class DeepseekV3ForCausalLM(ServedByVllm, model.DeepseekV3ForCausalLM):
    """DeepSeek-V3, as `from_configs` of our worker or vLLM's own constructor builds it."""

    serves_fp8 = True
