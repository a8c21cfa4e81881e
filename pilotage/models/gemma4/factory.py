"""The class given to vLLM's model registry."""

from __future__ import annotations

from pilotage.models.common.factory import ServedByVllm
from pilotage.models.gemma4 import model


class Gemma4ForCausalLM(ServedByVllm, model.Gemma4ForCausalLM):
    """Gemma 4, as `from_configs` of our worker or vLLM's own constructor builds it."""
