"""The class given to vLLM's model registry."""

from __future__ import annotations

from pilotage.models.common.factory import ServedByVllm
from pilotage.models.mixtral import model


class MixtralForCausalLM(ServedByVllm, model.MixtralForCausalLM):
    """Mixtral, as `from_configs` of our worker or vLLM's own constructor builds it."""
