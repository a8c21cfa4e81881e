"""The values of a Gemma 2 config that the model uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from pilotage.models.common.config import DecoderConfig
from pilotage.models.common.reading import read

_BEYOND = (
    "norm_weight_offset",
    "attention_bias",
    "attention_output_bias",
    "attn_softcap",
    "embedding_scale",
    "logit_softcap",
)


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(DecoderConfig):
    """A Gemma 2 config.

    Attributes:
        embedding_scale: factor on the embedded tokens, sqrt(hidden_size).
        attn_softcap: bound of the attention scores, None for none.
    """

    embedding_scale: float
    attn_softcap: float | None

    @classmethod
    def from_configs(cls, hf_config: Any, neuron_config: Any = None) -> Self:
        """Read a Hugging Face config.

        Args:
            hf_config: a `Gemma2Config` of transformers, or the parsed config.json.
            neuron_config: the target's settings; none of them changes this model.

        Raises:
            Unsupported: a value that the model does not implement, named by its key.
        """
        spec = read(hf_config, beyond=_BEYOND, layer_types=("full_attention", "sliding_attention"))
        return cls.from_spec(spec, embedding_scale=spec.embedding_scale, attn_softcap=spec.attn_softcap)
