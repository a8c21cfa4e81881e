"""The class given to vLLM's model registry."""

from __future__ import annotations

from pilotage.models.common.factory import ServedByVllm
from pilotage.models.qwen3 import model


class Qwen3ForCausalLM(ServedByVllm, model.Qwen3ForCausalLM):
    """Qwen3, as `from_configs` of our worker or vLLM's own constructor builds it."""

    serves_fp8 = True
