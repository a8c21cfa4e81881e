"""The values that every dense decoder here is built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pilotage.arch.spec import ArchSpec
from pilotage.functional import RopeFrequencies
from pilotage.models.common.reading import frequencies
from pilotage.weights.dequantise import Fp8Scheme


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and constants under ArchSpec's names; a model's own config adds what is its own.

    Attributes:
        attn_scale: factor on q.k.
        layer_types: the kind of each layer, "full_attention" or "sliding_attention".
        sliding_window: keys that a query of a sliding layer sees, itself included.
        rope: frequencies by kind of layer, any scaling applied.
        logit_softcap: bound of the logits, None for none.
        fp8: how the checkpoint holds linear layers in 8-bit floats; None where it does not.
    """

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
    attn_scale: float
    tie_word_embeddings: bool
    layer_types: tuple[str, ...]
    sliding_window: int | None
    rope: Mapping[str, RopeFrequencies]
    logit_softcap: float | None = None
    fp8: Fp8Scheme | None = None

    @classmethod
    def from_spec(cls, spec: ArchSpec, **own: Any) -> Self:
        """Take the common fields from a spec that `reading.read` has passed; `own` are the subclass's.

        Raises:
            Unsupported: a RoPE type that is not implemented.
        """
        kinds = tuple(dict.fromkeys(spec.layer_types))
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
            attn_scale=spec.attn_scale,
            tie_word_embeddings=spec.tie_word_embeddings,
            layer_types=spec.layer_types,
            sliding_window=spec.sliding_window if "sliding_attention" in kinds else None,
            rope={kind: frequencies(spec, kind) for kind in kinds},
            logit_softcap=spec.logit_softcap,
            **own,
        )

    def window(self, layer_idx: int) -> int | None:
        """The window of a layer; None where it sees everything."""
        return self.sliding_window if self.layer_types[layer_idx] == "sliding_attention" else None


@dataclass(frozen=True, kw_only=True)
class MoEConfig(DecoderConfig):
    """A decoder in which some or all feed-forward blocks are experts behind a router.

    Attributes:
        num_experts, num_experts_per_token: E, and how many of them a token goes to.
        moe_intermediate_size: F of one expert.
        norm_topk_prob: the kept probabilities are divided by their sum.
        mlp_layer_types: "sparse" or "dense" for each layer.
    """

    num_experts: int
    num_experts_per_token: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    mlp_layer_types: tuple[str, ...]

    @classmethod
    def from_moe_spec(cls, spec: ArchSpec, **own: Any) -> Self:
        """Take the common fields from a spec that `reading.read` has passed, `own` before them."""
        found = {
            "num_experts": spec.num_experts,
            "num_experts_per_token": spec.num_experts_per_token,
            "moe_intermediate_size": spec.moe_intermediate_size or spec.intermediate_size,
            "norm_topk_prob": bool(spec.norm_topk_prob),
            "mlp_layer_types": spec.mlp_layer_types,
        }
        return cls.from_spec(spec, **(found | own))
