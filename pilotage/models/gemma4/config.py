"""The values of a Gemma 4 text config that the model uses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pilotage.arch.spec import hf_config as arch_hf_config
from pilotage.models.common.config import DecoderConfig
from pilotage.models.common.reading import frequencies, read, refusal

_BEYOND = (
    "qk_norm",
    "attention_bias",
    "attention_output_bias",
    "embedding_scale",
    "logit_softcap",
    "num_experts",
    "num_kv_shared_layers",
    "k_eq_v",
    "per_layer_input_size",
    "per_layer_config",
)
# Read here from the config itself. What "vision" adds concerns image tokens alone.
_OWN = ("use_double_wide_mlp", "use_bidirectional_attention")


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(DecoderConfig):
    """A Gemma 4 text config.

    Attributes:
        embedding_scale: factor on the embedded tokens, sqrt(hidden_size).
        head_sizes, kv_heads: of each layer; `head_size` and `num_kv_heads` are those that no layer overrides.
        k_eq_v: layers of full attention take their values from the key projection.
        num_kv_shared_layers: how many of the last layers attend to an earlier layer's keys and values.
        double_wide_mlp: these layers have a feed-forward block of twice the width.
        per_layer_input_size: P, channels of the input that every layer gets for each token; 0 for none.
        per_layer_vocab_size: tokens that have one.
        num_experts: E beside the dense block of each layer; None for none.
        num_experts_per_token, moe_intermediate_size: how many a token goes to, and F of one.
    """

    embedding_scale: float
    head_sizes: tuple[int, ...]
    kv_heads: tuple[int, ...]
    k_eq_v: bool
    num_kv_shared_layers: int
    double_wide_mlp: bool
    per_layer_input_size: int
    per_layer_vocab_size: int
    num_experts: int | None
    num_experts_per_token: int | None
    moe_intermediate_size: int | None

    @classmethod
    def from_configs(cls, hf_config: Any, neuron_config: Any = None) -> Self:
        """Read a Hugging Face config.

        Args:
            hf_config: a `Gemma4TextConfig`, or the parsed config.json.
            neuron_config: the target's settings; none of them changes this model.

        Raises:
            Unsupported: a value that the model does not implement, named by its key; among them
                `use_bidirectional_attention` "all".
        """
        config = arch_hf_config(dict(hf_config)) if isinstance(hf_config, Mapping) else hf_config
        text = config.get_text_config()
        spec = read(hf_config, beyond=_BEYOND, layer_types=("full_attention", "sliding_attention"), own=_OWN)
        if getattr(text, "use_bidirectional_attention", None) == "all":
            raise refusal(spec, "use_bidirectional_attention", "'all': tokens that see later ones are not generated")
        overrides = spec.per_layer_config
        layers = range(spec.num_layers)
        for layer, values in overrides.items():
            odd = sorted(set(values) - {"head_dim", "num_key_value_heads"})
            if odd:
                raise refusal(spec, "per_layer_config", f"{odd[0]!r} of layer {layer} is not implemented")
        head_sizes = tuple(overrides.get(layer, {}).get("head_dim", spec.head_size) for layer in layers)
        kinds = {
            kind: {size for size, of in zip(head_sizes, spec.layer_types, strict=True) if of == kind}
            for kind in dict.fromkeys(spec.layer_types)
        }
        for kind, sizes in kinds.items():
            if len(sizes) > 1:
                raise refusal(spec, "per_layer_config", f"{kind} layers have heads of {sorted(sizes)}; one is served")
        found = cls.from_spec(
            spec,
            embedding_scale=spec.embedding_scale,
            head_sizes=head_sizes,
            kv_heads=tuple(overrides.get(i, {}).get("num_key_value_heads", spec.num_kv_heads) for i in layers),
            k_eq_v=bool(spec.k_eq_v),
            num_kv_shared_layers=spec.num_kv_shared_layers or 0,
            double_wide_mlp=bool(text.use_double_wide_mlp),
            per_layer_input_size=spec.per_layer_input_size or 0,
            per_layer_vocab_size=text.vocab_size_per_layer_input,
            num_experts=spec.num_experts,
            num_experts_per_token=spec.num_experts_per_token,
            moe_intermediate_size=spec.moe_intermediate_size,
        )
        for layer in layers:
            if spec.num_heads % found.kv_heads[layer]:
                raise refusal(
                    spec, "per_layer_config", f"{found.kv_heads[layer]} key/value heads do not divide {spec.num_heads}"
                )
            if found.kv_source(layer) is None:
                raise refusal(
                    spec,
                    "num_kv_shared_layers",
                    f"no layer before the shared ones is of kind {spec.layer_types[layer]!r}, as layer {layer} is",
                )
        # Each kind's RoPE is laid out over that kind's heads.
        rope = {kind: frequencies(spec, kind, head_size=min(sizes)) for kind, sizes in kinds.items()}
        return dataclasses.replace(found, rope=rope)

    def kv_source(self, layer_idx: int) -> int | None:
        """The layer whose keys and values a layer attends to: itself, or the last of its kind that has its own.

        None where there is none.
        """
        first_shared = self.num_layers - self.num_kv_shared_layers
        if layer_idx < first_shared:
            return layer_idx
        kind = self.layer_types[layer_idx]
        return next((i for i in reversed(range(first_shared)) if self.layer_types[i] == kind), None)

    def of_layer(self, layer_idx: int) -> Self:
        """This config with the head sizes, the key/value heads and the width of one layer."""
        wide = self.double_wide_mlp and layer_idx >= self.num_layers - self.num_kv_shared_layers
        return dataclasses.replace(
            self,
            head_size=self.head_sizes[layer_idx],
            num_kv_heads=self.kv_heads[layer_idx],
            intermediate_size=self.intermediate_size * (2 if wide else 1),
        )
