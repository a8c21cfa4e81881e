"""The class given to vLLM's model registry."""

from __future__ import annotations

from pilotage.models.common.factory import ServedByVllm
from pilotage.models.gemma2 import model


class Gemma2ForCausalLM(ServedByVllm, model.Gemma2ForCausalLM):
    """Gemma 2, as `from_configs` of our worker or vLLM's own constructor builds it."""

    serves_fp8 = True
