"""ArchSpec: one set of names over every place and generation of Hugging Face config."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from pilotage.arch.spec import ArchSpec
from pilotage.core.errors import ConfigError, Unsupported

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
GEMMA3_TEXT = {
    "model_type": "gemma3_text",
    "hidden_size": 640,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 300,
    "sliding_window": 512,
}


def test_sizes_and_where_they_came_from() -> None:
    spec = ArchSpec.from_hf(LLAMA)
    assert (spec.architecture, spec.model_type, spec.wrapper_type) == ("LlamaForCausalLM", "llama", None)
    assert (spec.hidden_size, spec.num_layers, spec.num_heads, spec.num_kv_heads) == (4096, 4, 32, 8)
    assert spec.fields["hidden_size"].source_key == "hidden_size" and spec.fields["hidden_size"].stated
    assert spec.head_size == 128
    assert not spec.fields["head_size"].stated
    assert spec.fields["head_size"].source_key == "derived: hidden_size // num_heads"
    assert spec.activation == "silu" and not spec.fields["activation"].stated


def test_legacy_and_new_rope_give_the_same_spec() -> None:
    new = {key: value for key, value in LLAMA.items() if not key.startswith("rope")}
    new["rope_parameters"] = {"rope_theta": 500000.0, **LLAMA["rope_scaling"]}
    old_rope, new_rope = (ArchSpec.from_hf(config).rope["full_attention"] for config in (LLAMA, new))
    assert dataclasses.replace(old_rope, raw={}) == dataclasses.replace(new_rope, raw={})
    assert (old_rope.theta, old_rope.kind, old_rope.factor, old_rope.original_max_position) == (
        5e5,
        "llama3",
        8.0,
        8192,
    )


def test_an_unstated_rope_base_is_marked_as_defaulted() -> None:
    bare = {key: value for key, value in LLAMA.items() if not key.startswith("rope")}
    spec = ArchSpec.from_hf(bare)
    assert spec.rope["full_attention"].theta == 10000.0
    assert not spec.fields["rope"].stated
    assert ArchSpec.from_hf(LLAMA).fields["rope"].stated


def test_a_rope_base_nobody_states_is_an_error() -> None:
    # Gemma 4's class leaves a given mapping as it is, so a missing base stays missing.
    config = {
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}},
    }
    with pytest.raises(ConfigError, match="rope"):
        ArchSpec.from_hf(config)


def test_rope_per_layer_type_from_gemma3s_legacy_keys() -> None:
    config = GEMMA3_TEXT | {
        "rope_theta": 2e6,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    rope = ArchSpec.from_hf(config).rope
    assert (rope["full_attention"].theta, rope["full_attention"].kind, rope["full_attention"].factor) == (
        2e6,
        "linear",
        8.0,
    )
    assert (rope["sliding_attention"].theta, rope["sliding_attention"].kind) == (2e4, "default")


def test_what_only_the_source_says() -> None:
    gemma, llama = ArchSpec.from_hf(GEMMA3_TEXT), ArchSpec.from_hf(LLAMA)
    assert gemma.embedding_scale == 640**0.5 and llama.embedding_scale == 1.0
    assert gemma.norm_weight_offset == 1.0 and llama.norm_weight_offset == 0.0
    assert gemma.qk_norm and not llama.qk_norm
    assert "Gemma3TextModel" in gemma.fields["embedding_scale"].source_key
    assert gemma.attn_scale == 300**-0.5
    assert gemma.fields["attn_scale"].source_key == "query_pre_attn_scalar" and gemma.fields["attn_scale"].stated


def test_qwen2_has_a_bias_that_no_config_key_states() -> None:
    spec = ArchSpec.from_hf({"model_type": "qwen2", "num_hidden_layers": 2})
    assert spec.attention_bias is True and spec.attention_output_bias is False


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GEMMA3_TEXT, ("sliding_attention",) * 5 + ("full_attention",)),
        (GEMMA3_TEXT | {"sliding_window_pattern": 2}, ("sliding_attention", "full_attention") * 3),
        (LLAMA, ("full_attention",) * 4),
        ({"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": 4096}, ("sliding_attention",) * 2),
        ({"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": None}, ("full_attention",) * 2),
        (
            {"model_type": "qwen2", "num_hidden_layers": 2, "sliding_window": 4096, "use_sliding_window": False},
            ("full_attention",) * 2,
        ),
    ],
)
def test_layer_types(config: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert ArchSpec.from_hf(config).layer_types == expected


def test_experts() -> None:
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 5, "first_k_dense_replace": 2, "n_routed_experts": 16}
    spec = ArchSpec.from_hf(config)
    assert spec.num_experts == 16 and spec.mlp_layer_types == ("dense",) * 2 + ("sparse",) * 3
    assert spec.head_size == 128 + 64 and spec.kv_lora_rank == 512
    assert ArchSpec.from_hf(LLAMA).num_experts is None


def test_deepseeks_yarn_multiplies_the_softmax_scale() -> None:
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 4, "rope_theta": 10000.0}
    yarn = {"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}}
    plain, scaled = ArchSpec.from_hf(config), ArchSpec.from_hf(config | yarn)
    assert plain.attn_scale == 192**-0.5
    assert scaled.attn_scale / plain.attn_scale == pytest.approx((0.1 * 3.6888794541139363 + 1) ** 2)


def test_nested_text_config() -> None:
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "image_token_index": 262144,
        "text_config": GEMMA3_TEXT,
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    spec = ArchSpec.from_hf(config)
    assert (spec.model_type, spec.wrapper_type) == ("gemma3_text", "gemma3")
    assert spec.hidden_size == 640 and spec.fields["hidden_size"].source_key == "text_config.hidden_size"
    assert spec.modalities == ("vision",)
    assert "image_token_index" in spec.unread and "vision_config" not in spec.unread


def test_flat_file_of_a_wrapper() -> None:
    config = {"model_type": "qwen2_5_vl", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "vision_config": {"depth": 2}, "tie_word_embeddings": True}
    spec = ArchSpec.from_hf(config)
    assert spec.wrapper_type == "qwen2_5_vl" and spec.hidden_size == 256
    assert spec.fields["hidden_size"].source_key == "hidden_size" and spec.fields["hidden_size"].stated
    assert spec.tie_word_embeddings is True


def test_layers_that_differ_in_size() -> None:
    config = {"model_type": "gemma4_text", "num_hidden_layers": 6, "head_dim": 256, "global_head_dim": 512}
    spec = ArchSpec.from_hf(config)
    assert spec.head_size == 256
    assert spec.per_layer_config == {5: {"head_dim": 512}}
    assert spec.rope["full_attention"].partial_rotary_factor == 0.25


def test_unread_keys_are_listed() -> None:
    spec = ArchSpec.from_hf(LLAMA | {"shiny_new_gate": 3, "torch_dtype": "bfloat16", "use_cache": True})
    assert spec.unread == ("shiny_new_gate",)


def test_a_config_object_reads_the_file_it_came_from(tmp_path: Path) -> None:
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    spec = ArchSpec.from_hf(AutoConfig.from_pretrained(tmp_path))
    assert spec.fields["num_layers"].stated and not spec.fields["activation"].stated


def test_a_config_object_without_a_file_compares_with_its_class() -> None:
    from transformers import LlamaConfig

    spec = ArchSpec.from_hf(LlamaConfig(hidden_size=64, num_attention_heads=4))
    assert spec.fields["hidden_size"].stated and not spec.fields["num_layers"].stated


def test_it_is_json() -> None:
    assert json.loads(json.dumps(ArchSpec.from_hf(GEMMA3_TEXT).to_json()))["fields"]["hidden_size"]["value"] == 640


def test_infinities_as_transformers_writes_them() -> None:
    config = {"model_type": "mamba2", "time_step_limit": [0.0, {"__float__": "Infinity"}], "num_hidden_layers": 2}
    assert ArchSpec.from_hf(config).layer_types == ("linear_attention",) * 2


def test_unknown_names_the_nearest() -> None:
    with pytest.raises(Unsupported, match="gemma3"):
        ArchSpec.from_hf({"model_type": "gemma33"})
    with pytest.raises(ConfigError, match="model_type"):
        ArchSpec.from_hf({"hidden_size": 3})


def test_a_refused_value_is_explained() -> None:
    with pytest.raises(ConfigError, match="llama config refused"):
        ArchSpec.from_hf(LLAMA | {"hidden_size": "many"})


def test_no_such_field() -> None:
    with pytest.raises(AttributeError, match="colour"):
        _ = ArchSpec.from_hf(LLAMA).colour
