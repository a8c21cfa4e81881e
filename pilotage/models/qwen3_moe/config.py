"""The values of a Qwen3-MoE config that the model uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from pilotage.models.common.config import MoEConfig
from pilotage.models.common.reading import read

_BEYOND = ("qk_norm", "attention_bias", "attention_output_bias", "num_experts")


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(MoEConfig):
    """A Qwen3-MoE config; nothing beyond the common fields."""

    @classmethod
    def from_configs(cls, hf_config: Any, neuron_config: Any = None) -> Self:
        """Read a Hugging Face config.

        Args:
            hf_config: a `Qwen3MoeConfig` of transformers, or the parsed config.json.
            neuron_config: the target's settings; none of them changes this model.

        Raises:
            Unsupported: a value that the model does not implement, named by its key.
        """
        spec = read(hf_config, beyond=_BEYOND, layer_types=("full_attention", "sliding_attention"))
        return cls.from_moe_spec(spec)
