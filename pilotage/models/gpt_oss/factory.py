"""The class given to vLLM's model registry."""

from __future__ import annotations

from pilotage.models.common.factory import ServedByVllm
from pilotage.models.gpt_oss import model


class GptOssForCausalLM(ServedByVllm, model.GptOssForCausalLM):
    """gpt-oss, as `from_configs` of our worker or vLLM's own constructor builds it."""
