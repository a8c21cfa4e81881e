"""The values of a Mistral config that the model uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from pilotage.models.common.config import DecoderConfig
from pilotage.models.common.reading import read


@dataclass(frozen=True, kw_only=True)
class MistralConfig(DecoderConfig):
    """A Mistral config; nothing beyond the common fields. With a window every layer has it."""

    @classmethod
    def from_configs(cls, hf_config: Any, neuron_config: Any = None) -> Self:
        """Read a Hugging Face config.

        Args:
            hf_config: a `MistralConfig` of transformers, or the parsed config.json.
            neuron_config: the target's settings; none of them changes this model.

        Raises:
            Unsupported: a value that the model does not implement, named by its key.
        """
        return cls.from_spec(read(hf_config, layer_types=("full_attention", "sliding_attention")))
