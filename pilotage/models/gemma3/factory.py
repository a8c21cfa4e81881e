"""The class given to vLLM's model registry."""

from __future__ import annotations

from pilotage.models.common.factory import ServedByVllm
from pilotage.models.gemma3 import model


class Gemma3ForCausalLM(ServedByVllm, model.Gemma3ForCausalLM):
    """Gemma 3, as `from_configs` of our worker or vLLM's own constructor builds it."""

    serves_fp8 = True
