"""The values of a Llama config that the model uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from pilotage.models.common.config import DecoderConfig
from pilotage.models.common.reading import read


@dataclass(frozen=True, kw_only=True)
class Llama3Config(DecoderConfig):
    """A Llama config; nothing beyond the common fields."""

    @classmethod
    def from_configs(cls, hf_config: Any, neuron_config: Any = None) -> Self:
        """Read a Hugging Face config.

        Args:
            hf_config: a `LlamaConfig`, or the parsed config.json.
            neuron_config: the target's settings; none of them changes this model.

        Raises:
            Unsupported: a value that the model does not implement, named by its key.
        """
        return cls.from_spec(read(hf_config, beyond=("attention_bias", "attention_output_bias", "mlp_bias")))
