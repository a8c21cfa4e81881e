"""Reading a config strictly: what a model does not implement is refused by its key, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pilotage.functional as NF
from pilotage.arch.spec import ArchSpec
from pilotage.arch.spec import hf_config as arch_hf_config
from pilotage.core.errors import Unsupported
from pilotage.functional import RopeFrequencies

# What a dense decoder without special features has. A model lists the fields in which it goes beyond.
PLAIN: dict[str, Any] = {
    "norm_kind": "rms",
    "norm_weight_offset": 0.0,
    "qk_norm": False,
    "attention_bias": False,
    "attention_output_bias": False,
    "mlp_bias": False,
    "attn_softcap": None,
    "logit_softcap": None,
    "embedding_scale": 1.0,
    "residual_multiplier": 1.0,
    "logit_multiplier": 1.0,
    "attention_chunk_size": None,
    "nope_layers": (),
    "rope_interleave": False,
    "num_experts": None,
    "kv_lora_rank": None,
    "num_kv_shared_layers": 0,
    "k_eq_v": False,
    "per_layer_input_size": 0,
    "per_layer_config": {},
    "quantization": None,
    "modalities": (),
}


def read(
    hf_config: Any,
    *,
    beyond: tuple[str, ...] = (),
    layer_types: tuple[str, ...] = ("full_attention",),
    own: tuple[str, ...] = (),
) -> ArchSpec:
    """Normalise a config and refuse what the caller's model does not implement.

    Args:
        hf_config: a Hugging Face config, or the parsed `config.json`.
        beyond: fields of `PLAIN` that the model reads itself, so that any value of them is its own to judge.
        layer_types: kinds of layer that the model has.
        own: keys of the config that no field reads and the model reads itself.

    Raises:
        Unsupported: a field outside `beyond` with another value than `PLAIN`, a kind of layer outside `layer_types`,
            an unknown activation, or another key that transformers knows and the config sets to something that nothing
            here reads.
    """
    config = arch_hf_config(dict(hf_config)) if isinstance(hf_config, Mapping) else hf_config
    spec = ArchSpec.from_hf(hf_config)
    _refuse_unread(spec, config, own)
    for name, plain in PLAIN.items():
        if name == "modalities" and spec.wrapper_type:  # towers beside a nested language model: `common.nested`
            continue
        field = spec.fields[name]
        if name not in beyond and field.value != plain:
            raise refusal(spec, name, f"{field.value!r} is not implemented by this model; it has {plain!r}")
    for kind in dict.fromkeys(spec.layer_types):
        if kind not in layer_types:
            raise refusal(spec, "layer_types", f"layers of kind {kind!r} are not implemented by this model")
    if "sliding_attention" in spec.layer_types and not spec.sliding_window:
        raise refusal(spec, "sliding_window", "there are sliding layers, and it is not given")
    if spec.activation not in NF.ACTIVATIONS:
        raise refusal(
            spec, "activation", f"activation {spec.activation!r} is not implemented", do=", ".join(NF.ACTIVATIONS)
        )
    if spec.num_heads % spec.num_kv_heads:
        raise refusal(spec, "num_kv_heads", f"{spec.num_kv_heads} key/value heads do not divide {spec.num_heads} heads")
    return spec


def _refuse_unread(spec: ArchSpec, config: Any, own: tuple[str, ...]) -> None:
    """Refuse keys that no field reads where the config class knows them and their value is not its default."""
    text = config.get_text_config()
    defaults = type(text)().to_dict()
    for key in spec.unread:
        name = key.rpartition(".")[2]
        if name in own:
            continue
        value = getattr(text, name, None)
        if name in defaults and (value or None) != (defaults[name] or None):  # null, false and 0 all switch off
            raise refusal(spec, key, f"{value!r} is not implemented by this model; its default is {defaults[name]!r}")


def refusal(spec: ArchSpec, name: str, what: str, do: str | None = None) -> Unsupported:
    """Build the error for a field, under the key that the user's config has for it; `name` may be such a key itself."""
    key = spec.fields[name].source_key if name in spec.fields else None
    return Unsupported(what, where=f"config.json, {key or name}", do=f"served are {do}" if do else None)


def frequencies(spec: ArchSpec, layer_type: str, head_size: int | None = None) -> RopeFrequencies:
    """Compute the RoPE frequencies of one kind of layer, whose heads have `head_size` where not the config's.

    Raises:
        Unsupported: the kind has none, or a RoPE type that is not implemented.
    """
    rope = spec.rope.get(layer_type)
    if rope is None:
        raise refusal(spec, "rope", f"no rotary embedding is given for layers of kind {layer_type!r}")
    return NF.rope_frequencies(
        theta=rope.theta,
        head_size=head_size or spec.head_size,
        kind=rope.kind,
        factor=rope.factor,
        low_freq_factor=rope.low_freq_factor,
        high_freq_factor=rope.high_freq_factor,
        original_max_position=rope.original_max_position,
        partial_rotary_factor=rope.partial_rotary_factor,
        attention_factor=rope.attention_factor,
        beta_fast=rope.beta_fast,
        beta_slow=rope.beta_slow,
        mscale=rope.mscale,
        mscale_all_dim=rope.mscale_all_dim,
        truncate=bool(rope.raw.get("truncate", True)),
    )
