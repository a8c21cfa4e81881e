"""The fields of an `ArchSpec`: each a rule that reads one normalised value and says where it came from.

| field | meaning |
|---|---|
| hidden_size, num_layers, num_heads, num_kv_heads, head_size, intermediate_size, vocab_size | sizes |
| activation | the MLP's activation, by Hugging Face's name; `hidden_activation` wins over a legacy `hidden_act` |
| norm_kind, norm_eps, norm_weight_offset | "rms" or "layer", its epsilon, what is added to the stored weight |
| qk_norm | queries and keys are normalised |
| attention_bias, attention_output_bias, mlp_bias | biases of the projections |
| attn_scale, attn_softcap, logit_softcap, embedding_scale | factors and caps; a cap of None is no cap |
| residual_multiplier, logit_multiplier | on each residual branch; on the logits (Granite divides: stored inverted) |
| layer_types, sliding_window, attention_chunk_size | the kind of each layer; how far a sliding one sees, in tokens |
| mlp_layer_types | "dense" or "sparse" for each layer |
| rope | `RopeSpec` by kind of layer; empty without rotary embedding |
| nope_layers | layers without position encoding |
| rope_interleave | rotates neighbouring pairs, not halves |
| num_experts, num_experts_per_token, moe_intermediate_size, num_shared_experts, norm_topk_prob, routed_scaling | MoE |
| num_expert_groups, num_expert_groups_per_token | groups of experts, of which a token chooses from a few |
| kv_lora_rank, q_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim | latent attention (MLA) |
| num_kv_shared_layers, k_eq_v, per_layer_input_size, per_layer_config | what differs between layers |
| tie_word_embeddings, max_position, bos_token_id, eos_token_id, pad_token_id | the rest of a language model |
| modalities, quantization, num_mtp_layers | encoders beside it, how its weights are stored, draft layers after it |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pilotage.arch import facts
from pilotage.arch.fields import ENCODER_KEYS, Field, Reader, is_config
from pilotage.arch.rope import ropes_by_layer_type
from pilotage.core.errors import ConfigError

Rule = Callable[[Reader], Field]


def _plain(*names: str, default: Any = None) -> Rule:
    return lambda reader: reader.first(names, default)


def _source(fact: Callable[..., tuple[Any, str] | None], *names: str, default: Any = None, **options: Any) -> Rule:
    """The source's word; a config key of its own where the source gives none."""

    def rule(reader: Reader) -> Field:
        stated = reader.first(names, default)
        found = reader.fact(lambda source: fact(source, **_config_of(fact, reader), **options))
        return found or stated

    return rule


def _config_of(fact: Callable[..., Any], reader: Reader) -> dict[str, Any]:
    return {"config": reader.text} if "config" in fact.__code__.co_varnames[: fact.__code__.co_argcount] else {}


def _required(field: Field, name: str, reader: Reader) -> Field:
    if field.value is None:
        raise ConfigError(
            f"{reader.text.model_type} states no {name}", where="config.json", do="not a language model's config?"
        )
    return field


def _size(name: str, *names: str) -> Rule:
    return lambda reader: _required(reader.first(names), name, reader)


def _num_kv_heads(reader: Reader) -> Field:
    found = reader.first(("num_key_value_heads", "num_kv_heads", "n_head_kv"))
    if found.value is not None:
        return found
    if reader.get("multi_query") is True:
        return Field(value=1, source_key=reader.key("multi_query"), stated=reader.states("multi_query"))
    heads = FIELDS["num_heads"](reader)
    return Field(value=heads.value, source_key=f"derived: {heads.source_key}", stated=False)


def _head_size(reader: Reader) -> Field:
    nope, rotary = reader.get("qk_nope_head_dim"), reader.get("qk_rope_head_dim")
    if isinstance(nope, int) and isinstance(rotary, int):
        reader.mark("head_dim", "qk_head_dim")
        key = f"derived: {reader.key('qk_nope_head_dim')} + {reader.key('qk_rope_head_dim')}"
        return Field(value=nope + rotary, source_key=key, stated=reader.states("qk_nope_head_dim"))
    found = reader.first(("head_dim", "attention_head_dim", "head_size", "kv_channels"))
    if found.value is not None and found.stated:
        return found
    hidden, heads = FIELDS["hidden_size"](reader).value, FIELDS["num_heads"](reader).value
    if found.value is not None and (not heads or found.value != hidden // heads):
        return found
    return Field(value=hidden // heads if heads else None, source_key="derived: hidden_size // num_heads", stated=False)


def _activation(reader: Reader) -> Field:
    # `hidden_act` is a leftover in Gemma files that say `hidden_activation` as well.
    return reader.first(("hidden_activation", "hidden_act", "activation_function", "activation", "ff_activation"))


def _tie(reader: Reader) -> Field:
    name = "tie_word_embeddings"
    inner = reader.first((name,), False)
    if not reader.prefix:
        return inner
    # Hugging Face ties by the wrapper's flag; files that state it in one place only mean that one.
    reader.mark_outer(name)
    outer = Field(value=getattr(reader.config, name, False), source_key=name, stated=name in reader.raw)
    if outer.stated:
        return outer
    return inner if inner.stated else Field(value=outer.value, source_key=name, stated=False)


def _token(name: str) -> Rule:
    def rule(reader: Reader) -> Field:
        found = reader.first((name,))
        if reader.prefix:
            reader.mark_outer(name)
            if not found.stated and name in reader.raw:
                return Field(value=reader.raw[name], source_key=name, stated=True)
        return found

    return rule


def _window(reader: Reader) -> Field:
    # The class has already applied `use_sliding_window` where it knows it; older ones keep the number beside it.
    switch = reader.get("use_sliding_window")
    found = reader.first(("sliding_window", "sliding_window_size"))
    types = getattr(reader.text, "layer_types", None)
    if switch is False and not (types and any("sliding" in kind for kind in types)):
        key = reader.key("use_sliding_window")
        return Field(value=None, source_key=key, stated=reader.states("use_sliding_window"))
    return found


def _layer_types(reader: Reader) -> Field:
    reader.mark("sliding_window_pattern", "_sliding_window_pattern", "max_window_layers", "full_attention_interval")
    found = reader.first(("layer_types", "layers_block_type", "block_types"))
    count = FIELDS["num_layers"](reader).value
    if isinstance(found.value, list | tuple) and found.value:
        return Field(value=tuple(found.value), source_key=found.source_key, stated=found.stated)
    window = _window(reader)
    kind = "sliding_attention" if window.value is not None else "full_attention"
    if reader.source is not None and facts.attention_class(reader.source) is None:
        kind = "linear_attention"
    return Field(value=(kind,) * count, source_key="derived: sliding_window", stated=False)


def _rope(reader: Reader) -> Field:
    keys = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "rotary_emb_base", "default_theta")
    shares = ("partial_rotary_factor", "rotary_pct", "rope_pct", "rotary_dim")
    reader.mark(*keys, *shares, "original_max_position_embeddings", "rotary_base")
    share = reader.first(("partial_rotary_factor", "rotary_pct", "rope_pct")).value
    rotary_dim = reader.get("rotary_dim")
    if share is None and isinstance(rotary_dim, int):
        share = rotary_dim / _head_size(reader).value
    named = next((key for key in keys if reader.text_raw.get(key) is not None), "rope_parameters")
    where = reader.key(named)
    parameters = getattr(reader.text, "rope_parameters", None)
    ropes = ropes_by_layer_type(parameters, _layer_types(reader).value, share, where)
    return Field(value=ropes, source_key=where if ropes else None, stated=any(reader.text_raw.get(key) for key in keys))


def _nope_layers(reader: Reader) -> Field:
    found = reader.first(("no_rope_layers",), ())
    reader.mark("no_rope_layer_interval")
    # 1 means "with rotary embedding" in this key.
    return Field(
        value=tuple(i for i, has_rope in enumerate(found.value) if not has_rope),
        source_key=found.source_key,
        stated=found.stated or reader.states("no_rope_layer_interval"),
    )


def _num_experts(reader: Reader) -> Field:
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
    found = reader.first(names)
    if reader.get("enable_moe_block") is False:
        return Field(value=None, source_key=reader.key("enable_moe_block"), stated=reader.states("enable_moe_block"))
    return found if found.value != 0 else Field(value=None, source_key=found.source_key, stated=found.stated)


def _mlp_layer_types(reader: Reader) -> Field:
    found = reader.first(("mlp_layer_types",))
    dense_first = reader.get("first_k_dense_replace", 0)
    step, only = reader.get("decoder_sparse_step", 1), reader.get("mlp_only_layers", ())
    sparse_layers = reader.get("moe_layers")
    reader.mark("interleave_moe_layer_step", "moe_layer_freq", "mlp_layer_types")
    count = FIELDS["num_layers"](reader).value
    if found.value:
        return Field(value=tuple(found.value), source_key=found.source_key, stated=found.stated)
    if _num_experts(reader).value is None:
        return Field(value=("dense",) * count, source_key="derived: num_experts", stated=False)
    if sparse_layers is not None:
        kinds = tuple("sparse" if i in sparse_layers else "dense" for i in range(count))
        return Field(value=kinds, source_key=reader.key("moe_layers"), stated=reader.states("moe_layers"))
    kinds = tuple(
        "sparse" if i >= dense_first and i not in only and (i + 1) % step == 0 else "dense" for i in range(count)
    )
    switches = {"first_k_dense_replace": dense_first, "mlp_only_layers": only, "decoder_sparse_step": step != 1}
    key = next((name for name, value in switches.items() if value), None)
    if key:
        return Field(value=kinds, source_key=reader.key(key), stated=reader.states(key))
    return Field(value=kinds, source_key="derived: num_experts", stated=False)


def _attn_scale(reader: Reader) -> Field:
    stated = reader.first(("query_pre_attn_scalar", "attention_multiplier"))
    fact = reader.fact(lambda source: facts.attention_scale(source, reader.text))
    if fact is not None:
        return fact
    if stated.value is not None:
        is_scalar = "query_pre_attn_scalar" in (stated.source_key or "")
        return Field(
            value=float(stated.value) ** -0.5 if is_scalar else float(stated.value),
            source_key=stated.source_key,
            stated=stated.stated,
        )
    size = _head_size(reader).value
    return Field(value=size**-0.5 if size else None, source_key="derived: head_size", stated=False)


def _embedding_scale(reader: Reader) -> Field:
    found = reader.first(("embedding_multiplier", "scale_emb"))
    if found.value is not None:
        return Field(value=float(found.value), source_key=found.source_key, stated=found.stated)
    fact = reader.fact(lambda source: facts.embedding_scale(source, reader.text))
    return fact or Field(value=1.0, source_key=None, stated=False)


def _logit_multiplier(reader: Reader) -> Field:
    times, over = reader.first(("logit_scale", "lm_head_multiplier")), reader.first(("logits_scaling",))
    if over.value is not None:
        return Field(value=1.0 / float(over.value), source_key=over.source_key, stated=over.stated)
    return Field(value=float(times.value or 1.0), source_key=times.source_key, stated=times.stated)


def _shared_experts(reader: Reader) -> Field:
    width = reader.get("shared_expert_intermediate_size")
    found = reader.first(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"))
    if found.value is None and width:
        key = "shared_expert_intermediate_size"
        return Field(value=1, source_key=reader.key(key), stated=reader.states(key))
    return found


def _per_layer_config(reader: Reader) -> Field:
    reader.mark("per_layer_config", "global_head_dim", "num_global_key_value_heads", "block_configs")
    overrides = reader.text.to_dict().get("per_layer_config") or {}
    keys = ("per_layer_config", "global_head_dim", "num_global_key_value_heads")
    return Field(
        value={int(layer): values for layer, values in overrides.items()},
        source_key=next((reader.key(key) for key in keys if key in reader.text_raw), reader.key("per_layer_config")),
        stated=any(key in reader.text_raw for key in keys),
    )


def _per_layer_input_size(reader: Reader) -> Field:
    reader.mark("vocab_size_per_layer_input")
    return reader.first(("hidden_size_per_layer_input",), 0)


def _modalities(reader: Reader) -> Field:
    found = []
    for key, modality in ENCODER_KEYS.items():
        if is_config(getattr(reader.config, key, None)):
            reader.mark_outer(key)
            found.append((key, modality))
    kinds = tuple(dict.fromkeys(modality for _, modality in found))
    stated = any(key in reader.raw for key, _ in found)
    return Field(value=kinds, source_key=", ".join(key for key, _ in found) or None, stated=stated)


def _quantization(reader: Reader) -> Field:
    found = reader.first(("quantization_config", "compression_config"))
    if found.value is None and reader.prefix and getattr(reader.config, "quantization_config", None):
        reader.mark_outer("quantization_config")
        found = Field(value=reader.config.quantization_config, source_key="quantization_config", stated=True)
    value = found.value if found.value is None or isinstance(found.value, dict) else found.value.to_dict()
    method = value.get("quant_method", "unnamed") if value else None
    return Field(value=method, source_key=found.source_key, stated=found.stated)


FIELDS: dict[str, Rule] = {
    "hidden_size": _size("hidden_size", "hidden_size", "n_embd", "d_model", "dim"),
    "num_layers": _size("num_hidden_layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_heads": _plain("num_attention_heads", "n_head", "n_heads", "num_heads", default=0),
    "num_kv_heads": _num_kv_heads,
    "head_size": _head_size,
    "intermediate_size": _plain("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "ff_dim"),
    "vocab_size": _size("vocab_size", "vocab_size"),
    "max_position": _plain("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    "activation": _activation,
    "norm_kind": _source(facts.norm_kind),
    "norm_eps": _plain("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", "norm_epsilon"),
    "norm_weight_offset": _source(facts.norm_weight_offset, default=0.0),
    "qk_norm": _source(facts.query_key_norm, "use_qk_norm", "qk_layernorm", default=False),
    "attention_bias": _source(
        facts.linear_bias, "attention_bias", "qkv_bias", "use_qkv_bias", "use_bias", "bias", default=False, output=False
    ),
    "attention_output_bias": _source(facts.linear_bias, "attention_out_bias", "attention_bias", output=True),
    "mlp_bias": _plain("mlp_bias", "use_mlp_bias", default=False),
    "attn_scale": _attn_scale,
    "attn_softcap": _plain("attn_logit_softcapping", "attention_logit_cap"),
    "logit_softcap": _plain("final_logit_softcapping", "output_logit_softcap"),
    "embedding_scale": _embedding_scale,
    "residual_multiplier": _plain("residual_multiplier", default=1.0),
    "logit_multiplier": _logit_multiplier,
    "tie_word_embeddings": _tie,
    "layer_types": _layer_types,
    "sliding_window": _window,
    "attention_chunk_size": _plain("attention_chunk_size"),
    "mlp_layer_types": _mlp_layer_types,
    "rope": _rope,
    "nope_layers": _nope_layers,
    "rope_interleave": _plain("rope_interleave", "rope_interleaved", default=False),
    "num_experts": _num_experts,
    "num_experts_per_token": _plain(
        "num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "num_experts_per_token"
    ),
    "moe_intermediate_size": _plain("moe_intermediate_size", "expert_intermediate_size"),
    "num_shared_experts": _shared_experts,
    "norm_topk_prob": _plain("norm_topk_prob"),
    "swiglu_alpha": _plain("swiglu_alpha"),
    "swiglu_limit": _plain("swiglu_limit"),
    "num_expert_groups": _plain("n_group"),
    "num_expert_groups_per_token": _plain("topk_group"),
    "routed_scaling": _plain("routed_scaling_factor", "moe_router_scaling"),
    "kv_lora_rank": _plain("kv_lora_rank"),
    "q_lora_rank": _plain("q_lora_rank"),
    "qk_nope_head_dim": _plain("qk_nope_head_dim"),
    "qk_rope_head_dim": _plain("qk_rope_head_dim"),
    "v_head_dim": _plain("v_head_dim"),
    "num_kv_shared_layers": _plain("num_kv_shared_layers", default=0),
    "k_eq_v": _plain("attention_k_eq_v", default=False),
    "per_layer_input_size": _per_layer_input_size,
    "per_layer_config": _per_layer_config,
    "num_mtp_layers": _plain("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", default=0),
    "bos_token_id": _token("bos_token_id"),
    "eos_token_id": _token("eos_token_id"),
    "pad_token_id": _token("pad_token_id"),
    "modalities": _modalities,
    "quantization": _quantization,
}
