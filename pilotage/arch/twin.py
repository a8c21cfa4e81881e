"""A tiny checkpoint of any architecture that transformers knows, on which porting faults show.

`arch.tiny` has a few models whose every number is chosen; this makes one from the config of whatever is being ported:
its flags and its pattern kept, its sizes small and unequal, its weights moved off their neutral values.
"""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from pilotage.arch.modeling import root_class
from pilotage.arch.spec import ArchSpec, hf_config
from pilotage.core.errors import Unsupported

_HIDDEN, _HEADS, _HEAD_SIZE, _VOCABULARY = 60, 6, 20, 320
# Sizes that architectures state under their own names. Unequal, and no power of two where that is allowed.
_SIZES = {
    "hidden_size": _HIDDEN,
    "intermediate_size": 92,
    "num_attention_heads": _HEADS,
    "head_dim": _HEAD_SIZE,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 1024,
    "sliding_window": 16,
    "attention_chunk_size": 16,
    "query_pre_attn_scalar": 11,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_intermediate_size": 44,
    "shared_expert_intermediate_size": 36,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": _VOCABULARY,
    "global_head_dim": 24,
    "num_global_key_value_heads": 3,
    "max_window_layers": 2,
    "num_nextn_predict_layers": 0,
}
_TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
_SPREAD = 0.16
_VECTOR_SPREAD = 0.3


def shrink(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Make the config of a tiny model of the same architecture.

    Args:
        raw: a parsed config.json; of a multimodal model, its language model is taken.

    Returns:
        A config.json with the same flags and kinds of layers.

    Raises:
        Unsupported: transformers has no class that generates text from this config.
    """
    config, spec = hf_config(raw), ArchSpec.from_hf(raw)
    text = config.get_text_config(decoder=True) if spec.wrapper_type else config
    root = root_class(text)
    if root is None or not root.endswith(("ForCausalLM", "LMHeadModel")):
        raise Unsupported(
            f"transformers has no class that generates text from {text.model_type} alone",
            where="config.json",
            do="write the parity tests against the whole model",
        )
    stated = copy.deepcopy(text.to_dict() if spec.wrapper_type else {**text.to_dict(), **raw})
    for key in ("quantization_config", "auto_map", "per_layer_config", "torch_dtype", "_name_or_path"):
        stated.pop(key, None)
    if spec.kv_lora_rank is not None:  # the class computes these two, each in its own way
        stated = {key: value for key, value in stated.items() if key not in ("head_dim", "qk_head_dim")}
    if spec.per_layer_config:  # given as the two keys that its class turns into the per-layer values
        stated |= {"global_head_dim": 1, "num_global_key_value_heads": 1}
    small = {key: _SIZES[key] if key in _SIZES and value is not None else value for key, value in stated.items()}
    layers = _layers(spec)
    small |= {"model_type": text.model_type, "architectures": [root], "num_hidden_layers": layers, "dtype": "float32"}
    small |= {key: value for key, value in _TOKENS.items() if key in stated}
    if "num_key_value_heads" in small:
        groups = spec.num_heads // spec.num_kv_heads if spec.num_kv_heads else 1
        small["num_key_value_heads"] = _HEADS if groups == 1 else 1 if spec.num_kv_heads == 1 else 2
    if isinstance(small.get("layer_types"), list):
        small["layer_types"] = _kinds(spec.layer_types, layers)
    if isinstance(small.get("mlp_layer_types"), list):
        small["mlp_layer_types"] = _kinds(spec.mlp_layer_types, layers)
    per_layer = {key: value for key, value in small.items() if _is_per_layer(value, spec.num_layers, layers)}
    small |= {key: _kinds(value, layers) for key, value in per_layer.items()}
    for key in ("rope_parameters", "rope_scaling"):
        small[key] = _rope(small.get(key)) if key in small else None
        if small[key] is None:
            del small[key]
    return small


def _layers(spec: ArchSpec) -> int:
    return 6 if len(set(spec.layer_types)) > 1 else 4


def _is_per_layer(value: Any, before: int, now: int) -> TypeGuard[list[Any]]:
    """Whether a value of the config states something of each layer, and has not been cut to their new number."""
    return (
        isinstance(value, list) and len(value) == before != now and not any(isinstance(v, dict | list) for v in value)
    )


def _kinds(kinds: Sequence[Any], count: int) -> list[Any]:
    """`count` kinds in which every kind of the model appears, in an uneven pattern."""
    names = list(dict.fromkeys(kinds))
    pattern = [names[0], *names]
    return [pattern[i % len(pattern)] for i in range(count - 1)] + [names[-1]]


def _rope(parameters: Any) -> Any:
    if not isinstance(parameters, Mapping):
        return parameters
    small = {key: _rope(value) if isinstance(value, Mapping) else value for key, value in parameters.items()}
    if "original_max_position_embeddings" in small:
        small["original_max_position_embeddings"] = 128
        small["factor"] = _SIZES["max_position_embeddings"] / 128
    if "mrope_section" in small:
        small["mrope_section"] = [_HEAD_SIZE // 2 - 6, 3, 3]
    return small


def build(config: Mapping[str, Any], directory: Path, *, seed: int = 0) -> Path:
    """Write a checkpoint with weights on which faults show: fp32 safetensors, config and a byte-level tokenizer.

    Args:
        config: what `shrink` gives, or a changed copy of it.
        directory: where to; made if it is not there.
        seed: another seed gives other weights.

    Returns:
        `directory`.

    Raises:
        ConfigError: the config class refuses it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from pilotage.arch.tiny_tokenizer import write_tokenizer

    model = AutoModelForCausalLM.from_config(hf_config(config), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(_VECTOR_SPREAD * noise)  # on top of what it starts from: 1 for most norms, 0 for biases
            else:
                parameter.copy_(_SPREAD * noise)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    # What was asked for, not what the class made of it: a port must read the file as it is found in the wild.
    (directory / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
    write_tokenizer(directory)
    return directory
