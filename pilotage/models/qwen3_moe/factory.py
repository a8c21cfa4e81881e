"""The class given to vLLM's model registry."""

from __future__ import annotations

from pilotage.models.common.factory import ServedByVllm
from pilotage.models.qwen3_moe import model


class Qwen3MoeForCausalLM(ServedByVllm, model.Qwen3MoeForCausalLM):
    """Qwen3-MoE, as `from_configs` of our worker or vLLM's own constructor builds it."""

    serves_fp8 = True
