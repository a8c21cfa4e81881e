"""The values of a Llama config that the model uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from pilotage.functional import RopeFrequencies
from pilotage.models.common.reading import frequencies, read


@dataclass(frozen=True, kw_only=True)
class Llama3Config:
    """Sizes and constants, under ArchSpec's names; `rope` holds the frequencies with any scaling applied."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    activation: str
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    rope: RopeFrequencies
    logit_softcap: None = None

    @classmethod
    def from_configs(cls, hf_config: Any, neuron_config: Any = None) -> Self:
        """Read a Hugging Face config.

        Args:
            hf_config: a `LlamaConfig`, or the parsed config.json.
            neuron_config: the target's settings; none of them changes this model.

        Raises:
            Unsupported: a value that the model does not implement, named by its key.
        """
        spec = read(hf_config, beyond=("attention_bias", "attention_output_bias", "mlp_bias"))
        return cls(
            hidden_size=spec.hidden_size,
            num_layers=spec.num_layers,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            intermediate_size=spec.intermediate_size,
            vocab_size=spec.vocab_size,
            norm_eps=spec.norm_eps,
            activation=spec.activation,
            attention_bias=bool(spec.attention_bias),
            attention_output_bias=bool(spec.attention_output_bias),
            mlp_bias=bool(spec.mlp_bias),
            tie_word_embeddings=spec.tie_word_embeddings,
            rope=frequencies(spec, "full_attention"),
        )
