"""The class given to vLLM's model registry."""

from __future__ import annotations

from pilotage.models.common.factory import ServedByVllm
from pilotage.models.mistral import model


class MistralForCausalLM(ServedByVllm, model.MistralForCausalLM):
    """Mistral, as `from_configs` of our worker or vLLM's own constructor builds it."""

    serves_fp8 = True
