"""The diff of real pairs of architectures names the work that an expert would list, and nothing else."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from pilotage.arch.diff import ArchDiff, diff
from pilotage.arch.diff.page import page
from pilotage.arch.diff.work import ROWS
from pilotage.core.errors import BadInput, ConfigError, Unavailable, Unsupported

CONFIGS = Path(__file__).parents[2] / "data" / "configs"


@functools.cache
def compared(a: str, b: str) -> ArchDiff:
    return diff(str(CONFIGS / a), str(CONFIGS / b / "config.json"))


GEMMA3_OVER_LLAMA = {
    "QK-norm",
    "Attention scale: query_pre_attn_scalar",
    "Head size of its own",
    "Layer pattern: sliding and full attention",
    "Two RoPE bases, by kind of layer",
    "Gelu-tanh MLP",
    "Four norms a layer",
    "Norm weights +1",
    "Tied head",
    "Scaled embedding",
}
PAIRS = {
    ("llama-3-8b", "gemma-3-270m"): GEMMA3_OVER_LLAMA,
    # A vision-language model with a nested text config, and the 4B's scaling of the full layers.
    ("llama-3-8b", "gemma-3-4b"): GEMMA3_OVER_LLAMA
    | {"RoPE scaling: linear", "Language model inside a multimodal one", "Vision encoder"},
    ("llama-3-8b", "qwen3-8b"): {"QK-norm"},
    ("llama-3-8b", "qwen3-0.6b"): {"QK-norm", "Head size of its own", "Tied head"},
    ("llama-3-8b", "gpt-oss-20b"): {
        "Attention sinks",
        "Bias on the q, k and v and output projections",
        "Head size of its own",
        "Layer pattern: sliding and full attention",
        "RoPE scaling: yarn",
        "Mixture of experts: 32 experts, 4 for each token",
        "Expert weights",
        "Expert router: softmax over the chosen",
        "Biases in the experts",
        "Clamped SwiGLU in the experts",
        "Norm weight applied in fp32",
        "Checkpoint quantised as mxfp4",
    },
    ("llama-3-8b", "deepseek-v3"): {
        "Latent attention (MLA)",
        "Dense and sparse MLP layers",
        "RoPE scaling: yarn",
        "Interleaved rotation",
        "Mixture of experts: 256 experts, 8 for each token",
        "Expert weights",
        "Expert router: sigmoid of the scores, with a correction bias that chooses but does not weigh, limited to 4 of "
        "8 groups, weights renormalised over the chosen, times 2.5",
        "Shared expert",
        "Checkpoint quantised as fp8",
        "Multi-token prediction layers",
    },
    ("llama-3.1-8b", "gemma-4-31b"): {
        "QK-norm",
        "Norm on values",
        "Attention scale: 1.0",
        "Keys used as values in full-attention layers",
        "Head size of its own",
        "Layer pattern: sliding and full attention",
        "Sizes that differ between layers",
        "Two RoPE bases, by kind of layer",
        "RoPE scaling: proportional",
        "Gelu-tanh MLP",
        "Four norms a layer",
        "Norm weight applied in fp32",
        "Language model inside a multimodal one",
        "Tied head",
        "Scaled embedding",
        "Softcap on the logits",
        "Vision encoder",
        "Bidirectional attention",
    },
    ("gemma-2-2b", "gemma-3-270m"): {
        "QK-norm",
        "Leave the softcap on attention scores out",
        "Layer pattern: 5 sliding_attention, 1 full_attention, repeating",
        "Two RoPE bases, by kind of layer",
        "Leave the softcap on the logits out",
    },
    ("mistral-7b-v0.1", "mixtral-8x7b"): {
        "Full attention in every layer",
        "Mixture of experts: 8 experts, 2 for each token",
        "Expert weights",
        "Expert router: softmax over all, weights renormalised over the chosen",
    },
    ("llama-3-8b", "qwen2.5-vl-7b"): {
        "Bias on the q, k and v projections",
        "Positions on several axes (M-RoPE)",
        "Language model inside a multimodal one",
        "Vision encoder",
    },
}


@pytest.mark.parametrize(("pair", "expected"), PAIRS.items(), ids=["-".join(pair) for pair in PAIRS])
def test_work_items(pair: tuple[str, str], expected: set[str]) -> None:
    assert {item.title for item in compared(*pair).work_items} == expected


@pytest.mark.parametrize("pair", PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_json_has_the_documented_shape(pair: tuple[str, str]) -> None:
    found = json.loads(json.dumps(compared(*pair).to_json()))
    assert len(found["models"]) == 2
    assert set(found["fields"]) == {"differ", "only_a", "only_b"}
    assert [row["row"] for row in found["checklist"]] == list(ROWS)
    for row in found["checklist"]:
        assert set(row) == {"row", "verdict", "fields", "touches", "block"}
        assert row["verdict"] in ("same", "differs", "absent")
        # What is not the same says by which fields, and where it is written.
        assert (row["verdict"] == "same") == (not row["fields"]) == (not row["touches"])
    for item in found["work_items"]:
        assert set(item) == {"title", "row", "touches", "why"}
        row = next(row for row in found["checklist"] if row["row"] == item["row"])
        assert row["verdict"] != "same"
        for place in item["touches"].split("; "):
            assert re.fullmatch(r"(model|config|weights)\.py: [\w.]+", place)
            assert place in row["touches"]


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.iterdir()))
def test_a_model_against_itself(name: str) -> None:
    found = compared(name, name)
    assert all(row.verdict == "same" for row in found.checklist)
    assert not found.work_items and not found.differ and not found.only_a and not found.only_b
    assert all(row.verdict == "same" for row in found.modules)
    assert all(method.verdict == "same" for method in found.methods)


def test_the_way_back_says_what_to_leave_out() -> None:
    found = compared("gemma-2-2b", "llama-3-8b")
    titles = {item.title for item in found.work_items}
    assert {"Leave the softcap on attention scores out", "Two norms a layer", "One kind of attention layer"} <= titles
    verdicts = {row.row: row.verdict for row in found.checklist}
    assert verdicts["Heterogeneous layers"] == "absent"  # Gemma 2 has a pattern, Llama none
    assert verdicts["Special features"] == "absent"  # and a softcap on the logits


def test_values_alone_are_no_work() -> None:
    found = compared("llama-3-8b", "llama-3.1-8b")
    assert [item.title for item in found.work_items] == ["RoPE scaling: llama3"]
    rows = {row.row: row for row in compared("llama-3-8b", "qwen3-8b").checklist}
    assert "values only" in rows["Position encoding"].touches  # another theta
    assert rows["Position encoding"].fields == ("rope_theta",)


def test_nested_text_config_is_resolved() -> None:
    found = compared("gemma-3-270m", "gemma-3-4b")
    assert found.differ["hidden_size"] == (640, 2560)
    assert "text_config" not in found.only_b and "vision_config" in found.only_b


def test_layers_are_folded() -> None:
    found = compared("llama-3-8b", "deepseek-v3")
    paths = [row.path for row in found.modules]
    assert any("model.layers.0-2.mlp" in path for path in paths) and any("layers.3-60.mlp" in path for path in paths)
    assert len(paths) < 80
    experts = next(row for row in found.modules if row.path.endswith("3-60.mlp.experts"))
    assert experts.verdict == "only_b" and "gate_up_proj [256, 4096, 7168]" in (experts.b or "")


def test_modules_compare_by_meaning() -> None:
    rows = {row.path.rpartition(".")[2]: row.verdict for row in compared("llama-3-8b", "gemma-3-270m").modules}
    assert rows["q_proj"] == rows["k_proj"] == rows["down_proj"] == "same"  # other numbers, the same meaning
    assert rows["q_norm"] == "only_b"


def test_methods_that_differ() -> None:
    found = {(m.role, m.method): m for m in compared("llama-3-8b", "gemma-3-270m").methods}
    assert found["MLP", "forward"].verdict == "same"
    assert found["Attention", "forward"].verdict == "differs"
    assert any("self.q_norm(query_states)" in line for line in found["Attention", "forward"].lines)
    assert found["function", "apply_rotary_pos_emb"].verdict == "same"


@pytest.mark.parametrize(
    ("change", "title"),
    [
        ({"attention_bias": True}, "Bias on the q, k and v and output projections"),
        ({"mlp_bias": True}, "Bias on the MLP projections"),
        ({"hidden_act": "gelu"}, "Exact gelu MLP"),
        ({"tie_word_embeddings": True}, "Tied head"),
        ({"head_dim": 64}, "Head size of its own"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE scaling: dynamic"),
        ({"quantization_config": {"quant_method": "awq"}}, "Checkpoint quantised as awq"),
    ],
)
def test_one_changed_key_is_one_item(tmp_path: Path, change: dict[str, Any], title: str) -> None:
    raw = json.loads((CONFIGS / "llama-3-8b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    found = diff(str(CONFIGS / "llama-3-8b"), str(tmp_path))
    assert [item.title for item in found.work_items] == [title]


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("granite", {"Attention scale: attention_multiplier"}),
        ("olmo2", {"QK-norm", "Norms at other places in the layer"}),
        ("cohere", {"Parallel attention and MLP", "LayerNorm (mean and variance)", "Interleaved rotation"}),
        ("gpt2", {"Learned position embedding", "MLP without a gate", "Fused q, k and v in the checkpoint"}),
        ("phi3", {"Fused q, k and v in the checkpoint", "Fused gate and up in the checkpoint"}),
        ("glm", {"Partial rotation"}),
        ("smollm3", {"Layers without RoPE"}),
        ("llama4_text", {"Chunked attention", "Layers without RoPE"}),
        ("qwen3_next", {"Layers that keep a state: linear_attention"}),
        ("starcoder2", {"MLP without a gate", "LayerNorm (mean and variance)"}),
    ],
)
def test_architectures_that_no_rule_names(tmp_path: Path, model_type: str, expected: set[str]) -> None:
    from transformers import CONFIG_MAPPING

    raw = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False)) | {"model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    titles = {item.title for item in diff(str(CONFIGS / "llama-3-8b"), str(tmp_path)).work_items}
    assert expected <= titles


def test_what_no_rule_explains_is_reported() -> None:
    """Parts that have no rule of their own come out by their module name."""
    import dataclasses

    from pilotage.arch.diff.compare import compare
    from pilotage.arch.diff.tree import Node

    llama = compared("llama-3-8b", "llama-3-8b").a
    assert llama.tree is not None

    def with_gate(node: Node) -> Node:
        children = tuple(with_gate(child) for child in node.children)
        if node.name == "self_attn":
            children += (Node(name="shiny_gate", kind="Linear", shapes={"weight": (32, 4096)}),)
        return dataclasses.replace(node, children=children)

    changed = dataclasses.replace(llama, name="shiny", tree=with_gate(llama.tree))
    items = compare(llama, changed).work_items
    assert [(item.title, item.row) for item in items] == [("New module self_attn.shiny_gate", "Attention method")]


def test_unread_keys_that_the_source_reads_are_work(tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING

    raw = json.loads(CONFIG_MAPPING["minicpm3"]().to_json_string(use_diff=False)) | {"model_type": "minicpm3"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    titles = [item.title for item in diff(str(CONFIGS / "llama-3-8b"), str(tmp_path)).work_items]
    assert any(title.startswith("Config keys of its own") and "scale_depth" in title for title in titles)


def test_page_is_self_contained() -> None:
    text = page(compared("llama-3-8b", "gemma-3-4b"))
    assert "QK-norm" in text and "Vision encoder" in text and "SiglipVisionModel" in text
    assert "http" not in text and "<script" not in text


def test_a_tree_that_cannot_be_built_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from pilotage.arch.diff import side as side_module
    from pilotage.arch.diff.compare import compare, raw_config

    def refuse(config: Any, text: Any) -> Any:
        raise ImportError("needs a kernel package")

    monkeypatch.setattr(side_module, "_build", refuse)
    sides = [side_module.side(name, raw_config(str(CONFIGS / name))) for name in ("llama-3-8b", "qwen3-8b")]
    found = compare(*sides)
    assert len(found.notes) == 2 and "needs a kernel package" in found.notes[0]
    assert "QK-norm" in {item.title for item in found.work_items}  # the source still says so


def _config(tmp_path: Path, text: str) -> str:
    (tmp_path / "config.json").write_text(text)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ('{"model_type": "llama", "hidden_size": ', BadInput, "not valid JSON"),
        ("[1, 2]", BadInput, "not a JSON object"),
        ('{"model_type": "gemma33"}', Unsupported, "gemma3"),
        ('{"model_type": "shiny", "auto_map": {"AutoConfig": "x.Y"}}', Unsupported, "code of its own"),
        ('{"hidden_size": 64}', ConfigError, "model_type"),
        ('{"model_type": "llama", "hidden_size": "wide"}', ConfigError, "hidden_size"),
        ('{"model_type": "llama", "rope_scaling": {"rope_type": "yarn"}}', ConfigError, "factor"),
    ],
)
def test_bad_configs_are_explained(tmp_path: Path, text: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        diff(str(CONFIGS / "llama-3-8b"), _config(tmp_path, text))


def test_models_out_of_reach_are_explained() -> None:
    with pytest.raises(Unavailable, match=r"google/gemma-4-31B-it.*config\.json is enough"):
        diff(str(CONFIGS / "llama-3-8b"), "google/gemma-4-31B-it")


def test_the_building_blocks_exist() -> None:
    import importlib

    import pilotage.functional as NF
    from pilotage import nn

    for row in compared("llama-3-8b", "gemma-3-270m").checklist:
        for name in re.findall(r"NF\.(\w+)", row.block):
            assert hasattr(NF, name), name
        for name in re.findall(r"pilotage\.nn\.(\w+)", row.block):
            assert hasattr(nn, name), name
        for module, name in re.findall(r"(pilotage\.(?!nn)[\w.]+)\.(\w+)", row.block):
            assert hasattr(importlib.import_module(module), name), name


@pytest.mark.slow
def test_every_architecture_of_transformers() -> None:
    """Nothing breaks on any of them, and none differs from itself."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as LANGUAGE
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as VISION

    from pilotage.arch.diff.compare import compare
    from pilotage.arch.diff.side import side

    llama = compared("llama-3-8b", "llama-3-8b").a
    compared_count = 0
    for model_type in dict.fromkeys([*LANGUAGE, *VISION]):
        try:
            raw = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False)) | {"model_type": model_type}
        except Exception:  # a class without defaults that it accepts itself
            continue
        try:
            new = side(model_type, raw)
        except ConfigError:
            continue  # states no sizes at all: not a language model's config
        compare(llama, new)
        found = compare(new, new)
        assert not found.work_items, model_type
        assert all(row.verdict == "same" for row in found.checklist), model_type
        compared_count += 1
    assert compared_count > 190
