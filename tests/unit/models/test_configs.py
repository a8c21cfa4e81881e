"""Configs: what a model does not implement is refused by its key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pilotage.core.errors import PilotageError, Unsupported
from pilotage.models import registry
from pilotage.models.common import BackendConfig
from pilotage.models.deepseek_v3 import DeepseekV3Config
from pilotage.models.gemma2 import Gemma2Config
from pilotage.models.gemma3 import Gemma3Config, Gemma3ForCausalLM
from pilotage.models.gemma4 import Gemma4Config
from pilotage.models.gpt_oss import GptOssConfig
from pilotage.models.llama3 import Llama3Config
from pilotage.models.mistral import MistralConfig
from pilotage.models.mixtral import MixtralConfig
from pilotage.models.qwen2 import Qwen2Config
from pilotage.models.qwen3 import Qwen3Config
from pilotage.models.qwen3_moe import Qwen3MoeConfig

Tiny = Callable[..., Path]
CLASSES: dict[str, Any] = {
    "llama3": Llama3Config,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma3": Gemma3Config,
    "gemma2": Gemma2Config,
    "gemma4": Gemma4Config,
    "mistral": MistralConfig,
    "mixtral": MixtralConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "gpt_oss": GptOssConfig,
    "deepseek_v3": DeepseekV3Config,
}


def raw(tiny: Tiny, name: str, **edits: Any) -> dict[str, Any]:
    return json.loads((tiny(name) / "config.json").read_text()) | edits


@pytest.mark.parametrize(
    ("name", "edit", "says"),
    [
        ("llama3", {"hidden_act": "quick_gelu"}, r"hidden_act: activation 'quick_gelu'.*silu"),
        (
            "llama3",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
            r"rope_type.*dynamic",
        ),
        ("llama3", {"quantization_config": {"quant_method": "fp8"}}, r"quantization_config: 'fp8'"),
        ("llama3", {"num_key_value_heads": 4}, r"num_key_value_heads: 4 key/value heads do not divide 6"),
        ("qwen3", {"layer_types": ["full_attention"] * 3 + ["chunked_attention"]}, r"layer_types.*chunked_attention"),
        ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, r"quantization_config: 'awq'"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 3 + ["chunked_attention"]}, r"layer_types.*chunked_attention"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, r"quantization_config: 'fp8'"),
        ("deepseek_v3", {"n_group": 3}, r"n_group: 3 groups do not divide 8 experts"),
        ("deepseek_v3", {"topk_group": 1}, r"topk_group: 1 of 4 groups do not hold the 3 experts of a token"),
        ("mixtral", {"quantization_config": {"quant_method": "fp8"}}, r"quantization_config: 'fp8'"),
        ("gemma2", {"use_bidirectional_attention": True}, r"use_bidirectional_attention: True is not implemented"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping: 50.0"),
        ("gemma3", {"use_bidirectional_attention": True}, r"use_bidirectional_attention: True is not implemented"),
        ("gemma3", {"layer_types": ["sliding_attention"] * 5}, r"\(6\) must be equal .*layer_types. \(5\)"),
    ],
)
def test_unsupported_values_are_named(tiny: Tiny, name: str, edit: dict[str, Any], says: str) -> None:
    CLASSES[name].from_configs(raw(tiny, name))
    with pytest.raises(PilotageError, match=says):
        CLASSES[name].from_configs(raw(tiny, name, **edit))


def test_keys_that_transformers_ignores_are_ignored(tiny: Tiny) -> None:
    assert Gemma3Config.from_configs(raw(tiny, "gemma3", trained_on="a laptop")) == Gemma3Config.from_configs(
        raw(tiny, "gemma3")
    )


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3.1-8b", "qwen3-0.6b", "qwen3-8b", "gemma-3-270m"])
def test_published_configs_are_read(name: str) -> None:
    config = json.loads((Path(__file__).parents[2] / "data" / "configs" / name / "config.json").read_text())
    read = registry.find(config["architectures"]).load().config_class.from_configs(config)
    assert (read.hidden_size, read.num_layers) == (config["hidden_size"], config["num_hidden_layers"])
    assert len(read.layer_types) == read.num_layers


def test_gemma_reads_what_makes_it_gemma(tiny: Tiny) -> None:
    config = Gemma3Config.from_configs(raw(tiny, "gemma3", query_pre_attn_scalar=11, final_logit_softcapping=30.0))
    assert config.attn_scale == pytest.approx(11**-0.5)
    assert config.embedding_scale == pytest.approx(60**0.5)
    assert config.logit_softcap == 30.0
    assert config.rope["sliding_attention"] != config.rope["full_attention"]
    windows = [config.window(i) for i in range(config.num_layers)]
    assert windows == [16, 16, None, 16, 16, None]
    assert Gemma3Config.from_configs(raw(tiny, "gemma3")) == Gemma3Config.from_configs(raw(tiny, "gemma3"))


def test_sparse_models_read_their_routing_and_experts(tiny: Tiny) -> None:
    qwen = Qwen3MoeConfig.from_configs(raw(tiny, "qwen3_moe"))
    assert (qwen.num_experts, qwen.num_experts_per_token, qwen.moe_intermediate_size) == (8, 3, 44)
    assert qwen.norm_topk_prob and qwen.mlp_layer_types == ("dense", "sparse", "sparse", "sparse")
    assert not Qwen3MoeConfig.from_configs(raw(tiny, "qwen3_moe", norm_topk_prob=False)).norm_topk_prob
    mixtral = MixtralConfig.from_configs(raw(tiny, "mixtral"))
    assert (mixtral.num_experts, mixtral.moe_intermediate_size, mixtral.norm_topk_prob) == (5, 92, True)
    gpt = GptOssConfig.from_configs(raw(tiny, "gpt_oss", swiglu_limit=3.5))
    assert (gpt.swiglu_alpha, gpt.swiglu_limit, gpt.attention_output_bias) == (1.702, 3.5, True)
    assert gpt.rope["full_attention"].amplitude > 1.2


def test_gemma2_reads_both_bounds(tiny: Tiny) -> None:
    config = Gemma2Config.from_configs(raw(tiny, "gemma2"))
    assert (config.attn_softcap, config.logit_softcap) == (5.0, 6.0)
    assert [config.window(i) for i in range(config.num_layers)] == [16, None, 16, None, 16]


def test_biases_come_from_the_architecture_or_the_file(tiny: Tiny) -> None:
    qwen2 = Qwen2Config.from_configs(raw(tiny, "qwen2"))
    assert (qwen2.attention_bias, qwen2.attention_output_bias) == (True, False)
    llama = Llama3Config.from_configs(raw(tiny, "llama3", attention_bias=True, mlp_bias=True))
    assert (llama.attention_bias, llama.attention_output_bias, llama.mlp_bias) == (True, True, True)


def test_the_kv_spec_and_bad_pages(tiny: Tiny) -> None:
    model = Gemma3ForCausalLM.from_configs(raw(tiny, "gemma3"))
    layers = model.get_kv_spec().layers
    assert [layer.name for layer in layers] == [f"layers.{i}.self_attn" for i in range(6)]
    assert [layer.sliding_window for layer in layers] == [16, 16, None, 16, 16, None]
    assert {(layer.num_kv_heads, layer.head_size, layer.dtype) for layer in layers} == {(2, 20, torch.float32)}
    pages = {layer.name: [torch.zeros(3, 2, 4, 20)] * 2 for layer in layers}
    with pytest.raises(PilotageError, match=r"do not match: layers.5.self_attn"):
        model.bind_kv_cache({name: pages[name] for name in list(pages)[:-1]})
    with pytest.raises(PilotageError, match=r"layers.0.self_attn.*\[3, 4, 2, 20\].*\[blocks, 2, block size, 20\]"):
        model.bind_kv_cache(pages | {"layers.0.self_attn": [torch.zeros(3, 4, 2, 20)] * 2})


def test_forward_refuses_what_it_does_not_do(tiny: Tiny) -> None:
    model = Gemma3ForCausalLM.from_configs(raw(tiny, "gemma3"))
    step = (torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32), {}, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(Unsupported, match="spec_decode_metadata"):
        model(*step, spec_decode_metadata=object())
    with pytest.raises(PilotageError, match="inputs_embeds and is_token_ids"):
        model(*step, inputs_embeds=torch.zeros(2, 60))
    with pytest.raises(PilotageError, match="rank 3"):
        model(*step, rank=3)


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"]
)
def test_factories_are_what_vllm_asks_for(architecture: str) -> None:
    import inspect

    entry = registry.find(["Unheard", architecture])
    assert entry is not None and entry.origin == "pilotage"
    factory = entry.load()
    assert factory.__name__ == architecture
    assert {"vllm_config", "prefix"} <= inspect.signature(factory.__init__).parameters.keys()
    assert {"input_ids", "positions"} <= inspect.signature(factory.forward).parameters.keys()
    for method in ("embed_input_ids", "compute_logits", "load_weights", "get_kv_spec", "bind_kv_cache", "from_configs"):
        assert callable(getattr(factory, method))


def test_vllm_may_construct_the_factory(tiny: Tiny) -> None:
    vllm_config = SimpleNamespace(model_config=SimpleNamespace(hf_config=raw(tiny, "gemma3")))
    built = registry.find(["Gemma3ForCausalLM"]).load()(vllm_config=vllm_config, prefix="")
    assert built.config == Gemma3Config.from_configs(raw(tiny, "gemma3"))
    assert isinstance(built, Gemma3ForCausalLM)


def test_an_unknown_architecture_is_not_found() -> None:
    assert registry.find(["UnheardForCausalLM"]) is None


def test_a_package_registers_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme_models.py").write_text("class AcmeForCausalLM:\n    pass\n")
    info = tmp_path / "acme_models-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-models\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[pilotage.models]\nAcmeForCausalLM = acme_models:AcmeForCausalLM\nBrokenForCausalLM = acme_models:Nothing\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    entry = registry.find(["AcmeForCausalLM"])
    assert entry is not None and entry.origin == "acme-models"
    assert entry.load().__name__ == "AcmeForCausalLM"
    broken = registry.find(["BrokenForCausalLM"])
    with pytest.raises(PilotageError, match=r"BrokenForCausalLM of acme-models.*acme_models:Nothing"):
        broken.load()


def test_backends_are_checked() -> None:
    with pytest.raises(PilotageError, match=r"BackendConfig.linear: 'tee' is unknown"):
        BackendConfig(linear="tee")
