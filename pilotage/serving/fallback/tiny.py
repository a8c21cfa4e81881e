"""A tiny perturbed checkpoint of any causal language model of transformers, for the table of what the fallback serves.

`arch.twin.shrink` makes most of them small; the rest goes by the names of its sizes (`plain`). What an architecture
needs beyond that is stated in `_OWN`: values without which its class builds no model, or that its published checkpoints
have and its class does not default to.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pilotage.core.errors import BadInput

_MOST_PARAMETERS = 16_000_000
_LAYERS = 4
# Every name that a size goes by, and sizes that divide.
_PLAIN = {
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size", "emb_dim"), 64
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "depth"), _LAYERS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "kv_n_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "ffn_hidden_size", "dim_ff"), 96),
    **dict.fromkeys(("d_inner", "adapter_rank", "lru_width"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "dim_head", "d_head"), 16),
    **{"n_group": 1, "topk_group": 1, "rotary_dim": 8, "sliding_window": 16, "vocab_size": 320},
    **{"kv_lora_rank": 24, "q_lora_rank": 28, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 14},
    **{"first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "zero_expert_num": 2},
}
# Left open by some config classes, whose models cannot be built without them.
_STATED = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **{"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 48},
    "head_dim": 16,
}
_PER_LAYER = ("layer_types", "mlp_layer_types", "attention_layers", "layers_block_type", "no_rope_layers")
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SMALL_IMAGES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_OWN: dict[str, dict[str, Any]] = {
    "BltForCausalLM": {
        "encoder_hash_byte_group_vocab": 100,
        "encoder_config": {"hidden_size_global": 64},
        "decoder_config": {"hidden_size_global": 64},
    },
    "CohereCompassForCausalLM": {
        "num_hidden_layers": _LAYERS,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        # Its published checkpoints have no rotary embedding in full layers.
        "rope_parameters": {"sliding_attention": {**_ROPE, "mrope_section": [3, 3, 2]}, "full_attention": None},
    },
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "GitForCausalLM": {"vision_config": {**_SMALL_IMAGES, "image_size": 32, "patch_size": 16}},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 2, "sliding_window": 16},
    "Gemma4AssistantForCausalLM": {
        "text_config": {
            **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "use_double_wide_mlp": False},
            **{"enable_moe_block": False, "num_hidden_layers": _LAYERS, "num_kv_shared_layers": _LAYERS},
        }
    },
    # Published checkpoints of both have convolutions in most layers; the classes default to none, or to nothing.
    "Lfm2ForCausalLM": {"num_hidden_layers": _LAYERS, "layer_types": ["conv", "full_attention"] * 2},
    "Lfm2MoeForCausalLM": {"num_hidden_layers": _LAYERS, "layer_types": ["conv", "full_attention"] * 2},
    "HrmTextForCausalLM": {"num_hidden_layers": 2, "num_layers_per_stack": None},
    "LongcatFlashForCausalLM": {
        **{"num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 48, "moe_topk": 2},
        **{"zero_expert_num": 2, "head_dim": 8, "qk_head_dim": 20},
    },
    **{key: {"decoder": {}} for key in ("MusicgenForCausalLM", "MusicgenMelodyForCausalLM")},
    "MllamaForCausalLM": {"text_config": {"cross_attention_layers": [1]}},
    "ModernBertDecoderForCausalLM": {"local_attention": 32},
    "Qwen4ExpForCausalLM": {
        "num_hidden_layers": _LAYERS,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 20, "indexer_budget": 32},
        "indexer_compress_ratio": 4,
    },
    "ReformerModelWithLMHead": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 16], "feed_forward_size": 96},
    "RecurrentGemmaForCausalLM": {"num_hidden_layers": 3, "attention_window_size": 16},
    "XmodForCausalLM": {"languages": ["en_XX", "de_DE"], "default_language": "en_XX"},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    "xLSTMForCausalLM": {"hidden_size": 64, "embedding_dim": 64, "num_heads": 4},
}


def checkpoint(architecture: str, model_type: str, directory: Path) -> Path:
    """Build a tiny checkpoint of an architecture whose own forward runs.

    Args:
        architecture, model_type: as transformers names them.
        directory: where to.

    Returns:
        The checkpoint's directory, inside `directory`.

    Raises:
        Exception: whatever stopped the first of the ways to make its config small.
    """
    from pilotage.arch import twin

    raw = _defaults(architecture, model_type)
    first: Exception | None = None
    for index, small in enumerate((twin.shrink, plain)):
        try:
            values = _merged(small(raw), _OWN.get(architecture, {}))
            _require_small(values)
            path = twin.build(values, directory / f"{architecture}-{index}")
            continue_greedily(path, [[3, 4, 5]], 1)  # sizes may be legal and still not fit each other
            return path
        except Exception as error:
            first = first or error
    assert first is not None
    raise first


def config(architecture: str, model_type: str) -> Any:
    """The config of an architecture as its class defaults it, or with what that leaves open."""
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **copy.deepcopy(_OWN.get(architecture, {})))


def _defaults(architecture: str, model_type: str) -> dict[str, Any]:
    own = _OWN.get(architecture, {})
    raw = {**config(architecture, model_type).to_dict(), "architectures": [architecture]}
    raw |= {key: value for key, value in _STATED.items() if key in raw and raw[key] is None}
    if "rope_parameters" in raw:
        rope = raw["rope_parameters"] or {}
        if not any(isinstance(value, Mapping) for value in rope.values()):
            raw["rope_parameters"] = {**_ROPE, **{key: value for key, value in rope.items() if value is not None}}
    if "is_decoder" in raw:  # without it the class reads in both directions
        raw["is_decoder"] = True
    if "is_encoder_decoder" in raw:  # the classes that are listed here are decoders alone
        raw["is_encoder_decoder"] = False
    return _merged(raw, own)


def _merged(values: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for key, value in own.items():
        inside = merged.get(key)
        if key.endswith("_config") and isinstance(inside, Mapping):
            merged[key] = _merged(inside, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def _require_small(values: Mapping[str, Any]) -> None:
    """Refuse what would fill the memory: a size that goes by a name nobody here knows stays as large as it was."""
    from transformers import AutoModelForCausalLM

    from pilotage.arch.spec import hf_config

    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(hf_config(values))
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > _MOST_PARAMETERS:
        raise BadInput(f"{count:,} parameters are left where {_MOST_PARAMETERS:,} are allowed", where="tiny config")


def plain(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Make any config small by the names of its sizes, nested ones as well; what it does not know it leaves."""
    small = copy.deepcopy(dict(raw))
    for key in ("quantization_config", "auto_map", "dtype", "torch_dtype"):
        small.pop(key, None)
    counts = {raw.get(key) for key in ("num_hidden_layers", "n_layer", "num_layers")}
    for key, value in raw.items():
        if isinstance(value, Mapping) and key.endswith("config"):
            small[key] = plain(value)
        elif key in _PLAIN and value is not None and not isinstance(value, list | dict):
            small[key] = _PLAIN[key]
        elif isinstance(value, list) and (key in _PER_LAYER or len(value) in counts):
            small[key] = _some(value, _LAYERS)
    for key in ("pad_token_id", "eos_token_id", "bos_token_id"):
        if small.get(key) is not None:
            small[key] = {"pad": 0, "eos": 1, "bos": 2}[key[:3]]
    return small


def _some(values: Sequence[Any], count: int) -> list[Any]:
    kinds = list(dict.fromkeys(map(str, values)))
    first = [next(v for v in values if str(v) == kind) for kind in kinds]
    return [first[i % len(first)] for i in range(count)]


@torch.no_grad()
def continue_greedily(path: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Greedy tokens of Hugging Face's own model, without a cache, in a copy of its own."""
    from transformers import AutoModelForCausalLM

    hf: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    hf.eval()
    said = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(hf(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        said.append(tokens[len(prompt) :])
    return said
