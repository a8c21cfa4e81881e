"""The language model inside a multimodal checkpoint: loaded from its nested config, served on text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pilotage.arch import tiny
from pilotage.core.errors import Unsupported, WeightError
from pilotage.models.common.nested import TextOfMultimodal
from pilotage.models.proof import weight_ledger

_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_IMAGES = {"image_size": 32, "patch_size": 16}
# Wrapper: its architecture, model type, the language model inside, and what else its config states.
WRAPPERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": (
        "gemma3",
        "gemma3",
        {"vision_config": {"model_type": "siglip_vision_model", **_VISION, **_IMAGES}, "mm_tokens_per_image": 4},
    ),
    "Gemma4ForConditionalGeneration": ("gemma4", "gemma4", {"vision_config": None, "audio_config": None}),
    "LlavaForConditionalGeneration": (
        "llava",
        "llama3",
        {"vision_config": {"model_type": "clip_vision_model", **_VISION, **_IMAGES, "projection_dim": 32}},
    ),
    "LlavaNextForConditionalGeneration": (
        "llava_next",
        "llama3",
        {
            "vision_config": {"model_type": "clip_vision_model", **_VISION, **_IMAGES, "projection_dim": 32},
            "image_grid_pinpoints": [[32, 32], [64, 32]],
        },
    ),
    "Mistral3ForConditionalGeneration": (
        "mistral3",
        "mistral",
        {"vision_config": {"model_type": "pixtral", **_VISION, **_IMAGES, "head_dim": 16}},
    ),
}
PROMPTS, NEW_TOKENS = (3, 21, 40), 8


def build(architecture: str, directory: Path) -> Path:
    """Write a tiny wrapper's checkpoint as transformers saves it, around a perturbed language model of `arch.tiny`."""
    from transformers import AutoModelForImageTextToText

    from pilotage.arch.spec import hf_config
    from pilotage.arch.tiny_tokenizer import write_tokenizer

    model_type, inside, others = WRAPPERS[architecture]
    text = tiny.config_dict(inside)
    outer = {
        "architectures": [architecture],
        "model_type": model_type,
        "text_config": text,
        "tie_word_embeddings": text["tie_word_embeddings"],
        **{key: text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id", "dtype")},
        "image_token_id" if model_type == "gemma4" else "image_token_index": 7,
        **others,
    }
    model = AutoModelForImageTextToText.from_config(hf_config(outer), dtype=torch.float32)
    own = {f"model.language_model.{name.removeprefix('model.')}": t for name, t in tiny.tensors(text, 0).items()}
    own = {name.replace("model.language_model.lm_head", "lm_head"): tensor for name, tensor in own.items()}
    absent = set(own) - set(model.state_dict())
    assert not absent, absent
    model.load_state_dict(own, strict=False)
    model.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(outer))
    write_tokenizer(directory)
    return directory


def expected(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    from transformers import AutoModelForImageTextToText

    hf = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    said = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(NEW_TOKENS):
            with torch.no_grad():
                tokens.append(int(hf(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        said.append(tokens[len(prompt) :])
    return said


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(10, 300, (size,), generator=generator).tolist() for size in PROMPTS]


@pytest.mark.parametrize("architecture", WRAPPERS)
def test_tokens_equal_the_whole_models_on_text(architecture: str, tmp_path: Path) -> None:
    from pilotage.models.common.paging import PagedSession

    path = build(architecture, tmp_path)
    model = TextOfMultimodal.from_configs(json.loads((path / "config.json").read_text()))
    ledger = model.load_weights(path)
    model.eval()
    wanted = prompts()
    session = PagedSession(model=model, num_requests=len(wanted), max_tokens=64)
    out = session.step(dict(enumerate(wanted)))
    said: list[list[int]] = [[] for _ in wanted]
    for step in range(NEW_TOKENS):
        new = {i: [int(rows[-1].argmax())] for i, rows in out.items()}
        for i, (token,) in new.items():
            said[i].append(token)
        if step + 1 < NEW_TOKENS:
            out = session.step(dict(sorted(new.items())), decode=True)
    assert said == expected(path, wanted)
    towers = {name for name in load_file(path / "model.safetensors") if "tower" in name or "projector" in name}
    assert bool(towers) == (architecture != "Gemma4ForConditionalGeneration")
    assert towers <= {entry.key for entry in ledger.tensors if entry.action == "drop"}


def test_the_ledger_says_why_towers_are_left_out(tmp_path: Path) -> None:
    path = build("LlavaForConditionalGeneration", tmp_path)
    found = weight_ledger(str(path)).to_json()
    assert "tower for other inputs than text" in json.dumps(found)


def test_a_missing_tensor_of_the_language_model_is_an_error(tmp_path: Path) -> None:
    path = build("LlavaForConditionalGeneration", tmp_path)
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.2.mlp.up_proj.weight"))
    del tensors[name]
    tensors["language_model.surprise.weight"] = torch.zeros(2)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    model = TextOfMultimodal.from_configs(json.loads((path / "config.json").read_text()))
    with pytest.raises(WeightError, match=r"layers\.2\.mlp\.up_proj") as raised:
        model.load_weights(path)
    assert "surprise" in str(raised.value)


def test_another_language_model_is_refused_by_name() -> None:
    text = {
        "model_type": "phi3",
        "hidden_size": 60,
        "num_attention_heads": 6,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
    }
    config = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    with pytest.raises(Unsupported, match=r"its language model Phi3ForCausalLM has no model package"):
        TextOfMultimodal.from_configs(config)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.distributed)])
def test_engine_tokens(ranks: int, tmp_path: Path) -> None:
    from pilotage.serving.greedy import greedy
    from pilotage.serving.launch import engine

    path = build("Gemma3ForConditionalGeneration", tmp_path)
    wanted = prompts()
    options = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32, "enforce_eager": True}
    with engine(path, dtype="float32", tensor_parallel_size=ranks, **options) as llm:
        said = greedy(llm, wanted, new_tokens=NEW_TOKENS, ignore_eos=True)
    assert [list(one.tokens) for one in said] == expected(path, wanted)
