"""Tiny checkpoints on which porting faults show, the same bytes on every machine.

A freshly initialised small model hides most faults: its biases are 0, its norms 1 and its attention nearly uniform.
Here matrices are scaled up, every one-dimensional parameter is moved off its neutral value, and no two sizes that a
port could confuse are equal: the head size is not hidden / heads, the query scale is not the head size, the two RoPE
bases differ, the window is shorter than any useful prompt.

Weights depend on the seed, the tensor's name and its shape alone, so a checkpoint with one configuration field changed
(`overrides`) holds the same weights: that is how a fault is planted without touching a model.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pilotage.arch.lock import built_once
from pilotage.arch.tiny_tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, write_tokenizer
from pilotage.core import store
from pilotage.core.errors import BadInput

# Part of the cache key: change it whenever the same arguments would give other bytes.
RECIPE = 1

_COMMON: dict[str, Any] = {
    "dtype": "float32",
    # Without a version transformers takes any local tokenizer for a faulty Mistral one, and says so each time.
    "transformers_version": "5.20.0",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 60,
    "intermediate_size": 92,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}

_CONFIGS: dict[str, dict[str, Any]] = {
    "llama3": {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "gemma3": {
        **_COMMON,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 11,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
        },
    },
    "qwen2": {
        **_COMMON,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "qwen3": {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
}
_CONFIGS |= {
    "qwen3_moe": {
        **_CONFIGS["qwen3"],
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 44,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
    },
    "mistral": {
        **_COMMON,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "sliding_window": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    },
    "mixtral": {
        **_COMMON,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "sliding_window": None,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "gemma2": {
        **_COMMON,
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "num_hidden_layers": 5,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 11,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        # Far below the published 50 and 30: scores and logits of so small a model would never reach those.
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 6.0,
        "use_bidirectional_attention": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
    },
    "gpt_oss": {
        **_COMMON,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": True,
        "tie_word_embeddings": False,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_local_experts": 7,
        "num_experts_per_tok": 2,
        "swiglu_alpha": 1.702,
        # Below the published 7, which no value of so small a model reaches.
        "swiglu_limit": 2.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
}
_CONFIGS["deepseek_v3"] = {
    **{key: value for key, value in _COMMON.items() if key != "head_dim"},
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    # The latents' norms have 1e-6 of their own.
    "rms_norm_eps": 1e-4,
    "num_key_value_heads": 6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "kv_lora_rank": 24,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "rope_interleave": True,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 44,
    "norm_topk_prob": True,
    "routed_scaling_factor": 0.6,  # below the published 2.5: half precision changes a choice now and then
    "num_nextn_predict_layers": 0,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 20000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        # Unequal, so that cos and sin are scaled as well as the scores.
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 128,
    },
}
_CONFIGS["gemma4"] = {
    **_COMMON,
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "num_hidden_layers": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 16,
    # The last three layers attend to what the fourth and the fifth have cached.
    "layer_types": [
        *("sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"),
        *("sliding_attention", "sliding_attention", "full_attention"),
    ],
    "num_kv_shared_layers": 3,
    "global_head_dim": 40,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 14,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "enable_moe_block": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
    # Below the published 30, which no logit of so small a model comes near.
    "final_logit_softcapping": 6.0,
    "use_bidirectional_attention": None,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
    },
}
for _name in ("mistral", "mixtral"):
    del _CONFIGS[_name]["attention_bias"]
# Qwen 2 has biases on q, k and v whatever `attention_bias` says, and transformers has no such field for it.
del _CONFIGS["qwen2"]["attention_bias"]

NAMES = tuple(sorted(_CONFIGS))

# Standard deviation of each matrix. Queries and keys are large so that attention is sharp enough for position and
# window faults to move the logits; where the model normalises the result again (q/k norms, Gemma's post norms) a small
# projection keeps the norm's epsilon visible in fp32.
_STD = {
    "q_proj": 0.16,
    "k_proj": 0.16,
    "v_proj": 0.16,
    "o_proj": 0.10,
    "gate_proj": 0.16,
    "up_proj": 0.16,
    "down_proj": 0.10,
    "embed_tokens": 0.30,
    "lm_head": 0.30,
    # Routers and experts; w1, w3 and w2 are Mixtral's gate, up and down, and gpt-oss stacks its experts.
    "gate": 0.16,
    "router": 0.16,
    "w1": 0.16,
    "w3": 0.16,
    "w2": 0.10,
    "gate_up_proj": 0.16,
    # DeepSeek's latents are normalised before they are projected up.
    "q_a_proj": 0.16,
    "q_b_proj": 0.30,
    "kv_a_proj_with_mqa": 0.16,
    "kv_b_proj": 0.30,
}
_STD_GEMMA3 = {**_STD, "q_proj": 0.05, "k_proj": 0.05, "o_proj": 0.02, "down_proj": 0.02}
# Gemma 2 normalises no queries and keys: they stay large, so that its bound on the scores shows.
_STD_GEMMA2 = {**_STD, "o_proj": 0.02, "down_proj": 0.02}
# Gemma 4's norms do not add one to their weight, and every layer adds an input of its own.
_STD_GEMMA4 = {
    **_STD_GEMMA3,
    "proj": 0.16,
    "embed_tokens_per_layer": 0.30,
    "per_layer_model_projection": 0.16,
    "per_layer_input_gate": 0.16,
    "per_layer_projection": 0.10,
}
_STD_VECTOR = 0.3
# Gemma 4 does not scale its scores: with norms near one they would pick single keys, and amplify every rounding.
_UNSCALED_NORM = 0.3
_NEUTRAL_IS_ONE = ("norm.weight", "norm_1.weight", "norm_2.weight", "layer_scalar", "router.scale", "per_expert_scale")
# With a tied head a large embedding makes every token predict itself: keep it small, and let the last norm scale up.
_STD_TIED_EMBEDDING = 0.05
_TIED_LAST_NORM = 5.0


def build(name: str, *, seed: int = 0, overrides: Mapping[str, Any] | None = None, cache: Path | None = None) -> Path:
    """Build a tiny fp32 checkpoint with tokenizer, once, and return its directory.

    Args:
        name: one of `NAMES`.
        seed: another seed gives other weights of the same shapes.
        overrides: configuration fields to replace, e.g. `{"sliding_window": 17}`; weights whose shape is unchanged stay
            the same bytes.
        cache: where to build; `store.home() / "tiny"` by default.

    Raises:
        BadInput: unknown name, or an override of a field that this configuration does not have.
    """
    config = config_dict(name, overrides)
    key = hashlib.sha256(json.dumps([RECIPE, config], sort_keys=True).encode()).hexdigest()[:10]
    path = (cache if cache is not None else store.home() / "tiny") / f"{name}-{seed}-{key}"

    def write(directory: Path) -> None:
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        ids = {field: config[field] for field in ("bos_token_id", "eos_token_id", "pad_token_id")}
        (directory / "generation_config.json").write_text(json.dumps({"_from_model_config": True, **ids}) + "\n")
        write_tokenizer(directory)
        save_file(tensors(config, seed), directory / "model.safetensors", metadata={"format": "pt"})

    return built_once(path, write)


def config_dict(name: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the contents of config.json for `name` with `overrides` applied (see `build`)."""
    if name not in _CONFIGS:
        near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.0)[0]
        raise BadInput(
            f"no tiny model is called {name!r}; the nearest is {near!r}",
            where=f"tiny:{name}",
            do=f"use one of {', '.join('tiny:' + known for known in NAMES)}",
        )
    config = json.loads(json.dumps(_CONFIGS[name]))
    for field, value in (overrides or {}).items():
        if field not in config:
            near = difflib.get_close_matches(field, list(config), n=1, cutoff=0.0)[0]
            raise BadInput(f"tiny:{name} has no field {field!r}", where=field, do=f"the nearest is {near!r}")
        config[field] = value
    if "num_hidden_layers" in (overrides or {}) and "layer_types" in config and "layer_types" not in (overrides or {}):
        kinds = config["layer_types"]
        config["layer_types"] = [kinds[layer % len(kinds)] for layer in range(config["num_hidden_layers"])]
    return config


def tensors(config: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Return the checkpoint's tensors by Hugging Face name, fp32."""
    tied = config["tie_word_embeddings"]
    gemma = {"gemma3_text": _STD_GEMMA3, "gemma2": _STD_GEMMA2}.get(config["model_type"])
    scales_by_weight = gemma is None
    if config["model_type"] == "gemma4_text":
        gemma = _STD_GEMMA4
    std = dict(gemma or _STD)
    if tied:
        std["embed_tokens"] = _STD_TIED_EMBEDDING
    result = {}
    for name, shape in shapes(config).items():
        noise = _noise(f"{seed}/{name}", shape)
        if len(shape) == 1 or name.endswith("_bias"):
            # Gemma's norms multiply by 1 + weight; every other norm multiplies by the weight.
            neutral = 1.0 if name.endswith(_NEUTRAL_IS_ONE) and scales_by_weight else 0.0
            if gemma is _STD_GEMMA4 and name.endswith(("q_norm.weight", "k_norm.weight")):
                neutral = _UNSCALED_NORM
            if tied and name == "model.norm.weight":
                neutral += _TIED_LAST_NORM
            result[name] = neutral + _STD_VECTOR * noise
        else:
            parts = name.split(".")
            result[name] = std[parts[-2] if parts[-1] == "weight" else parts[-1]] * noise
    return result


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every checkpoint tensor by Hugging Face name, in the order of the model."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kind = config["model_type"]
    layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    if kind == "gemma4_text":
        return _gemma4(config)
    layer |= _latent_attention(config) if kind == "deepseek_v3" else _attention(config)
    layer["post_attention_layernorm.weight"] = (hidden,)
    if kind in ("gemma3_text", "gemma2"):
        layer |= {"pre_feedforward_layernorm.weight": (hidden,), "post_feedforward_layernorm.weight": (hidden,)}
    dense: dict[str, tuple[int, ...]] = {}
    for name, rows, columns in (("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)):
        dense[f"mlp.{name}.weight"] = (rows, columns)
        if config.get("mlp_bias"):
            dense[f"mlp.{name}.bias"] = (rows,)
    sparse = _experts(config)
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for index in range(config["num_hidden_layers"]):
        is_dense = index in config.get("mlp_only_layers", ()) or (index + 1) % config.get("decoder_sparse_step", 1)
        is_dense = is_dense or index < config.get("first_k_dense_replace", 0)
        block = dense if is_dense or not sparse else sparse
        result |= {f"model.layers.{index}.{name}": shape for name, shape in (layer | block).items()}
    result["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        result["lm_head.weight"] = (config["vocab_size"], hidden)
    return result


def _attention(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a layer's attention."""
    kind, hidden, head = config["model_type"], config["hidden_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    attention_bias = kind == "qwen2" or config.get("attention_bias")
    layer: dict[str, tuple[int, ...]] = {}
    for name, rows in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
        layer[f"self_attn.{name}.weight"] = (rows, hidden)
        if attention_bias:
            layer[f"self_attn.{name}.bias"] = (rows,)
    layer["self_attn.o_proj.weight"] = (hidden, query)
    if attention_bias and kind != "qwen2":
        layer["self_attn.o_proj.bias"] = (hidden,)
    if kind in ("gemma3_text", "qwen3", "qwen3_moe"):
        layer |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    if kind == "gpt_oss":
        layer["self_attn.sinks"] = (config["num_attention_heads"],)
    return layer


def _gemma4(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a Gemma 4 text model, whose layers differ in shape."""
    hidden, count, size = config["hidden_size"], config["num_hidden_layers"], config["hidden_size_per_layer_input"]
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for index, kind in enumerate(config["layer_types"]):
        whole = kind == "full_attention"
        head = config["global_head_dim"] if whole else config["head_dim"]
        heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
        if whole and config["attention_k_eq_v"] and config["num_global_key_value_heads"]:
            key_heads = config["num_global_key_value_heads"]
        shares = index >= count - config["num_kv_shared_layers"]
        layer: dict[str, tuple[int, ...]] = {"self_attn.q_proj.weight": (heads * head, hidden)}
        layer["self_attn.q_norm.weight"] = (head,)
        if not shares:
            layer["self_attn.k_proj.weight"] = (key_heads * head, hidden)
            layer["self_attn.k_norm.weight"] = (head,)
            if not (whole and config["attention_k_eq_v"]):
                layer["self_attn.v_proj.weight"] = (key_heads * head, hidden)
        layer["self_attn.o_proj.weight"] = (hidden, heads * head)
        inner = config["intermediate_size"] * (2 if shares and config["use_double_wide_mlp"] else 1)
        layer |= {"mlp.gate_proj.weight": (inner, hidden), "mlp.up_proj.weight": (inner, hidden)}
        layer["mlp.down_proj.weight"] = (hidden, inner)
        names = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
        if config["enable_moe_block"]:
            names += ["post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"]
            experts, width = config["num_experts"], config["moe_intermediate_size"]
            layer |= {"router.proj.weight": (experts, hidden), "router.scale": (hidden,)}
            layer["router.per_expert_scale"] = (experts,)
            layer["experts.gate_up_proj"] = (experts, 2 * width, hidden)
            layer["experts.down_proj"] = (experts, hidden, width)
        for name in names:
            layer[f"{name if name[-1].isdigit() else name + '_layernorm'}.weight"] = (hidden,)
        layer["layer_scalar"] = (1,)
        if size:
            layer["per_layer_input_gate.weight"] = (size, hidden)
            layer["per_layer_projection.weight"] = (hidden, size)
            layer["post_per_layer_input_norm.weight"] = (hidden,)
        result |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    if size:
        result["model.embed_tokens_per_layer.weight"] = (config["vocab_size_per_layer_input"], count * size)
        result["model.per_layer_model_projection.weight"] = (count * size, hidden)
        result["model.per_layer_projection_norm.weight"] = (size,)
    result["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        result["lm_head.weight"] = (config["vocab_size"], hidden)
    return result


def _latent_attention(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a layer's latent attention."""
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rotated, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    queries = config["q_lora_rank"]
    layer: dict[str, tuple[int, ...]] = {}
    if queries is None:
        layer["self_attn.q_proj.weight"] = (heads * (nope + rotated), hidden)
    else:
        layer["self_attn.q_a_proj.weight"] = (queries, hidden)
        layer["self_attn.q_a_layernorm.weight"] = (queries,)
        layer["self_attn.q_b_proj.weight"] = (heads * (nope + rotated), queries)
    layer["self_attn.kv_a_proj_with_mqa.weight"] = (rank + rotated, hidden)
    layer["self_attn.kv_a_layernorm.weight"] = (rank,)
    layer["self_attn.kv_b_proj.weight"] = (heads * (nope + value), rank)
    layer["self_attn.o_proj.weight"] = (hidden, heads * value)
    if config["attention_bias"]:
        if queries is not None:
            layer["self_attn.q_a_proj.bias"] = (queries,)
        layer["self_attn.kv_a_proj_with_mqa.bias"] = (rank + rotated,)
        layer["self_attn.o_proj.bias"] = (hidden,)
    return layer


def _experts(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a layer's router and experts, as published checkpoints name them; empty without experts."""
    kind, hidden, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    found: dict[str, tuple[int, ...]] = {}
    if kind in ("qwen3_moe", "deepseek_v3"):
        inner = config["moe_intermediate_size"]
        count = config["num_experts" if kind == "qwen3_moe" else "n_routed_experts"]
        found["mlp.gate.weight"] = (count, hidden)
        if kind == "deepseek_v3":
            found["mlp.gate.e_score_correction_bias"] = (count,)
            shared = inner * config["n_shared_experts"]
            for name, shape in (("gate", (shared, hidden)), ("up", (shared, hidden)), ("down", (hidden, shared))):
                found[f"mlp.shared_experts.{name}_proj.weight"] = shape
        for expert in range(count):
            for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
                found[f"mlp.experts.{expert}.{name}_proj.weight"] = shape
    elif kind == "mixtral":
        found["block_sparse_moe.gate.weight"] = (config["num_local_experts"], hidden)
        for expert in range(config["num_local_experts"]):
            for name, shape in (("w1", (inner, hidden)), ("w3", (inner, hidden)), ("w2", (hidden, inner))):
                found[f"block_sparse_moe.experts.{expert}.{name}.weight"] = shape
    elif kind == "gpt_oss":
        count = config["num_local_experts"]
        found = {
            "mlp.router.weight": (count, hidden),
            "mlp.router.bias": (count,),
            "mlp.experts.gate_up_proj": (count, hidden, 2 * inner),
            "mlp.experts.gate_up_proj_bias": (count, 2 * inner),
            "mlp.experts.down_proj": (count, inner, hidden),
            "mlp.experts.down_proj_bias": (count, hidden),
        }
    return found


def parse(model: str) -> tuple[str, int]:
    """Split `tiny:gemma3@7` into name and seed.

    Raises:
        BadInput: what follows `@` is no seed.
    """
    match = re.fullmatch(r"tiny:([^@]*)(?:@(\d+))?", model)
    if not match:
        raise BadInput("not a tiny model and seed", where=model, do="write tiny:gemma3, or tiny:gemma3@7 for seed 7")
    return match[1], int(match[2] or 0)


def _noise(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return noise of mean 0 and variance 1 that any machine computes to the same bits.

    The sum of four 16-bit uniforms from an extendable hash: near enough to a Gaussian, and in exact arithmetic, where
    library generators differ between processors and versions in the last bit.
    """
    count = math.prod(shape)
    data = bytearray(hashlib.shake_256(key.encode()).digest(8 * count))
    sums = torch.frombuffer(data, dtype=torch.uint16).to(torch.int64).view(count, 4).sum(-1)
    centred = (2 * sums - 4 * 65535).double()
    return (centred * math.sqrt(3.0 / 4.0) / 65536.0).float().view(shape).contiguous()
