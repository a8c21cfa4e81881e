"""Day zero: models without a package, on Hugging Face's modules and our pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pilotage.core.errors import Unsupported, WeightError
from pilotage.serving.fallback import attention, check, table, tiny
from pilotage.serving.fallback.load import load
from pilotage.serving.fallback.model import require_length

# Parallel layers, windows, low-rank keys, learned positions, experts, scaled logits, positions that only a module
# of the model takes (Bart) or that begin behind the padding token (Roberta), layers that attend twice or are run
# several times (DiffLlama, HrmText), shared keys (Gemma3n), a projection that is called decoder (ModernBert).
SOME = {
    "BartForCausalLM": "bart",
    "Cohere2ForCausalLM": "cohere2",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DiffLlamaForCausalLM": "diffllama",
    "GPT2LMHeadModel": "gpt2",
    "Gemma3nForCausalLM": "gemma3n_text",
    "GraniteForCausalLM": "granite",
    "HrmTextForCausalLM": "hrm_text",
    "ModernBertDecoderForCausalLM": "modernbert-decoder",
    "OlmoeForCausalLM": "olmoe",
    "Phi3ForCausalLM": "phi3",
    "RobertaForCausalLM": "roberta",
    "Starcoder2ForCausalLM": "starcoder2",
}
REFUSED = {
    "BloomForCausalLM": ("bloom", "code of its own"),
    "BltForCausalLM": ("blt", "something else than the tokens"),
    "GlmMoeDsaForCausalLM": ("glm_moe_dsa", "indexer"),
    "Lfm2ForCausalLM": ("lfm2", "recurrent state"),
    "MambaForCausalLM": ("mamba", "recurrent state"),
    "MusicgenForCausalLM": ("musicgen", "no text"),
}


def checkpoint(architecture: str, model_type: str, directory: Path) -> Path:
    return tiny.checkpoint(architecture, model_type, directory)


@pytest.mark.parametrize("architecture", SOME)
def test_tokens_equal_hugging_faces(architecture: str, tmp_path: Path) -> None:
    row = table.examine(architecture, SOME[architecture], tmp_path)
    assert (row.state, row.reason) == (table.SERVED, "")
    assert row.tokens == len(table.PROMPTS) * table.NEW_TOKENS


@pytest.mark.parametrize("architecture", REFUSED)
def test_refused_with_the_reason(architecture: str, tmp_path: Path) -> None:
    model_type, reason = REFUSED[architecture]
    row = table.examine(architecture, model_type, tmp_path)
    assert row.state == table.REFUSED
    assert reason in row.reason


def test_windows_are_read_from_masks(tmp_path: Path) -> None:
    model = load(checkpoint("Cohere2ForCausalLM", "cohere2", tmp_path), dtype=torch.float32, max_model_len=64)
    assert {layer.window for layer in model.layers} == {16, None}


def test_a_wrong_window_is_caught_by_the_check(tmp_path: Path) -> None:
    model = load(checkpoint("Starcoder2ForCausalLM", "starcoder2", tmp_path), dtype=torch.float32, max_model_len=64)
    check.prove(model, max_model_len=64)
    model.layers[1].window = 7
    with pytest.raises(Unsupported, match="depends on more than the attention interface"):
        check.prove(model, max_model_len=64)


def test_positions_not_taken_are_caught_by_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(checkpoint("Phi3ForCausalLM", "phi3", tmp_path), dtype=torch.float32, max_model_len=64)
    forward = type(model.hf).forward

    def counts_by_itself(self: Any, **arguments: Any) -> Any:
        return forward(self, **{**arguments, "position_ids": torch.arange(arguments["input_ids"].shape[1])[None]})

    monkeypatch.setattr(model.hf, "forward", counts_by_itself.__get__(model.hf))
    with pytest.raises(Unsupported, match="positions are not taken as given"):
        check.prove(model, max_model_len=64)


def test_half_precision_is_checked_in_full_where_memory_allows(tmp_path: Path) -> None:
    path = checkpoint("Phi3ForCausalLM", "phi3", tmp_path)
    model = load(path, dtype=torch.bfloat16, max_model_len=64, free_bytes=1 << 32)
    assert model.proof.dtype == "float32" and max(model.proof.worst.values()) < 1e-4
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert load(path, dtype=torch.bfloat16, max_model_len=64).proof.dtype == "bfloat16"


def test_more_positions_than_the_model_has_are_refused(tmp_path: Path) -> None:
    for architecture, model_type in (("BartForCausalLM", "bart"), ("RobertaForCausalLM", "roberta")):
        path = checkpoint(architecture, model_type, tmp_path)
        limit = load(path, dtype=torch.float32, max_model_len=64).counting.limit
        assert limit is not None and limit <= json.loads((path / "config.json").read_text())["max_position_embeddings"]
        with pytest.raises(Unsupported, match=f"max_model_len={limit} or less"):
            load(path, dtype=torch.float32, max_model_len=limit + 1)


def test_a_layer_that_a_step_leaves_out_is_an_error(tmp_path: Path) -> None:
    """Its keys of these tokens would be missing later on."""
    path = checkpoint("Phi3ForCausalLM", "phi3", tmp_path)
    model = load(path, dtype=torch.float32, max_model_len=64)
    model.hf.model.layers = model.hf.model.layers[:-1]
    with pytest.raises(Unsupported, match=r"attended 3 times in a step, and 4 times when it was learnt"):
        table._serve(model)


def test_missing_weights_are_no_random_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = checkpoint("Phi3ForCausalLM", "phi3", tmp_path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("model.layers.1.mlp.down_proj.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(WeightError, match=r"model\.layers\.1\.mlp\.down_proj\.weight"):
        load(path, dtype=torch.float32, max_model_len=64)


def test_dynamic_rotary_embeddings_only_up_to_their_length() -> None:
    from transformers import HunYuanDenseV1Config, LlamaConfig

    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = LlamaConfig(max_position_embeddings=128, rope_parameters=rope)
    require_length(config, 128, "Llama")
    with pytest.raises(Unsupported, match="max_model_len=128 or less"):
        require_length(config, 129, "Llama")
    fixed = HunYuanDenseV1Config(max_position_embeddings=128, rope_parameters={**rope, "alpha": 1000.0})
    require_length(fixed, 256, "HunYuan")


@pytest.mark.parametrize(
    ("function", "window"),
    [
        (lambda b, h, q, k: k <= q, None),
        (lambda b, h, q, k: (k <= q) & (k > q - 4096), 4096),
    ],
)
def test_a_mask_is_read_far_beyond_the_probe(function: Any, window: int | None) -> None:
    assert attention._window_of_function(function) == window


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda b, h, q, k: (k <= q) & (k // 8192 == q // 8192), "chunks"),
        (lambda b, h, q, k: k <= q + 1, "behind it"),
        (lambda b, h, q, k: (k <= q) & (k % 2 == q % 2), "neither"),
        (lambda b, h, q, k: torch.zeros(7)[k] == 0, "content"),
    ],
)
def test_other_masks_are_refused(function: Any, why: str) -> None:
    with pytest.raises(Unsupported, match=why):
        attention._window_of_function(function)


def test_engine_tokens(tmp_path: Path) -> None:
    """Under the engine: packed, chunked and cached requests of a model without a package."""
    from pilotage.serving.greedy import greedy
    from pilotage.serving.launch import engine

    path = checkpoint("Cohere2ForCausalLM", "cohere2", tmp_path)
    words = json.loads((path / "config.json").read_text())["vocab_size"]
    expected, prompts = table.oracle(path, words), table.prompts(words)
    limits = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    with engine(path, dtype="float32", **limits) as llm:
        for _ in range(2):  # cold, then with prefix hits
            said = greedy(llm, prompts, new_tokens=table.NEW_TOKENS, ignore_eos=True)
            assert [list(one.tokens) for one in said] == expected
        assert llm.collective_rpc("receipt")[0]["fallback"]["dtype"] == "float32"


@pytest.mark.slow
def test_the_whole_table() -> None:
    found = table.sweep()
    assert [row.architecture for row in found if row.state == table.WRONG] == []
    assert sum(row.state == table.SERVED for row in found) >= 113  # as docs/fallback.md has it; it may only grow
    assert all(row.reason for row in found if row.state != table.SERVED)


def test_level_3_compares_its_modules_with_hugging_faces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pilotage.accuracy.validate import validate

    path = checkpoint("Cohere2ForCausalLM", "cohere2", tmp_path)
    found = validate(str(path), arms=["float32"], levels=[3])
    assert {one["verdict"]["status"] for one in found.modules} == {"pass"}
    assert {"attention", "decoder layer", "mlp", "norm", "embedding"} <= {one["kind"] for one in found.modules}
    assert "day-zero fallback" in found.verdicts[0].claim and "themselves" in found.verdicts[0].claim
    # A window that was read wrongly, and that the proof let through, must be named.
    monkeypatch.setattr(attention, "window_of", lambda *_: 7)
    trusted = check.Proof(dtype="float32", bound=1.0, worst={"alone": 0.0}, rows=1)
    monkeypatch.setattr("pilotage.serving.fallback.load.prove", lambda *_, **__: trusted)
    faulty = validate(str(path), arms=["float32"], levels=[3])
    failed = {one["module"] for one in faulty.modules if one["verdict"]["status"] == "fail"}
    assert any("self_attn" in name for name in failed) and not any("mlp" in name for name in failed)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["Cohere2ForCausalLM", "GPT2LMHeadModel"])
def test_validate_through_the_engine(architecture: str, tmp_path: Path) -> None:
    """Logits and cache; and modules, where they have the names that level 3 knows."""
    from pilotage.accuracy.validate import validate

    path = checkpoint(architecture, SOME[architecture], tmp_path)
    found = validate(str(path), arms=["float32"], levels=[2, 3])
    (arm,) = found.arms
    assert arm.status.value == "pass", [v.to_json() for v in arm.verdicts]
    assert {"kv_rms_ratio", "kv_worst_row"} <= {verdict.metric for verdict in arm.verdicts}
    assert found.to_json()["receipt"]["float32"]["fallback"]["dtype"] == "float32"
    if architecture == "GPT2LMHeadModel":
        assert not found.modules and found.status.value == "not_measured"
        assert "its decoder has no layers" in str(found.verdicts[-1].to_json())
    else:
        assert found.modules and found.status.value == "pass"
