"""Tiny twins of any architecture: small, of the same kinds of layers, and read alike by Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pilotage.arch import twin
from pilotage.arch.spec import ArchSpec
from pilotage.core.errors import Unsupported

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
NAMES = ("llama-3.1-8b", "gemma-3-4b", "gemma-4-31b", "gpt-oss-20b", "deepseek-v3", "mixtral-8x7b", "qwen3-0.6b")


def config(name: str) -> dict[str, object]:
    return json.loads((CONFIGS / name / "config.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_it_keeps_what_makes_the_architecture(name: str) -> None:
    large, small = ArchSpec.from_hf(config(name)), ArchSpec.from_hf(twin.shrink(config(name)))
    for field in ("activation", "norm_kind", "norm_weight_offset", "qk_norm", "attention_bias", "tie_word_embeddings"):
        assert getattr(large, field) == getattr(small, field), field
    for field in ("layer_types", "mlp_layer_types"):
        assert set(getattr(large, field)) == set(getattr(small, field)), field
    kinds = {kind: (rope.kind, rope.theta) for kind, rope in large.rope.items()}
    assert {kind: (rope.kind, rope.theta) for kind, rope in small.rope.items()} == kinds
    assert small.hidden_size < 100 and small.num_layers <= 6
    assert (large.num_experts is None) == (small.num_experts is None)
    assert bool(large.per_layer_config) == bool(small.per_layer_config)


@pytest.mark.parametrize("name", NAMES)
def test_hugging_face_loads_it_and_its_weights_matter(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = twin.build(twin.shrink(config(name)), tmp_path / "twin")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.arange(4, 60)[None]).logits
        assert logits.isfinite().all() and logits.std() > 0.3
        # No vector is at its neutral value: a dropped bias or an ignored norm weight shows.
        for parameter in (p for p in model.parameters() if p.ndim == 1 and p.numel() > 8):
            assert parameter.std() > 0.1
        # Position matters: the same token elsewhere has other logits.
        same = model(torch.full((1, 40), 7)).logits[0]
        shuffled = model(torch.tensor([[7, 9] * 20])).logits[0]
    assert not torch.allclose(same[-1], shuffled[-2], atol=1e-3)


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    small = twin.shrink(config("qwen3-0.6b"))
    one, two, other = (
        (twin.build(small, tmp_path / str(i), seed=seed) / "model.safetensors").read_bytes()
        for i, seed in enumerate((3, 3, 4))
    )
    assert one == two and one != other


def test_a_model_that_cannot_generate_text_alone() -> None:
    with pytest.raises(Unsupported, match="generates text"):
        twin.shrink(config("qwen2.5-vl-7b"))
