"""The values of a Gemma 3 text config that the model uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from pilotage.models.common.config import DecoderConfig
from pilotage.models.common.reading import read

_BEYOND = (
    "norm_weight_offset",
    "qk_norm",
    "attention_bias",
    "attention_output_bias",
    "embedding_scale",
    "logit_softcap",
)


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(DecoderConfig):
    """A Gemma 3 text config.

    Attributes:
        embedding_scale: factor on the embedded tokens, sqrt(hidden_size).
    """

    embedding_scale: float

    @classmethod
    def from_configs(cls, hf_config: Any, neuron_config: Any = None) -> Self:
        """Read a Hugging Face config.

        Args:
            hf_config: a `Gemma3TextConfig`, or the parsed config.json.
            neuron_config: the target's settings; none of them changes this model.

        Raises:
            Unsupported: a value that the model does not implement, named by its key; among them
                `attn_logit_softcapping`, which transformers' Gemma 3 reads and does not apply.
        """
        spec = read(hf_config, beyond=_BEYOND, layer_types=("full_attention", "sliding_attention"))
        return cls.from_spec(spec, embedding_scale=spec.embedding_scale)
