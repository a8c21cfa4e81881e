"""An 8-bit cache in the running engine: tokens of Hugging Face's model whose keys and values are rounded alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TIE, Oracle, Reference, generate, prompts_of, tokens_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from pilotage.core.errors import PilotageError
from pilotage.serving import launch

pytestmark = pytest.mark.engine

BUCKETS = {"num_batched_tokens_buckets": [16, 48], "num_seqs_buckets": [1, 4]}
LARGEST = 448.0


def scaled(path: Path, target: Path) -> Path:
    """Copy a checkpoint and add scales that differ by layer and cut the largest values off in some."""
    tensors = load_file(path / "model.safetensors")
    count = json.loads((path / "config.json").read_text())["num_hidden_layers"]
    for layer in range(count):
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(0.004 * (layer + 1))
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor([0.003 * (layer + 2)])
    shutil.copytree(path, target)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale


class RoundedOracle(Oracle):
    """Hugging Face's model, whose attention sees keys and values as the cache holds them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

        scales = load_file(path / "model.safetensors")

        def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Any:
            name = f"model.layers.{module.layer_idx}.self_attn"
            one = torch.tensor(1.0)
            k, v = (rounded(x, scales.get(f"{name}.{kind}_scale", one).reshape(())) for x, kind in ((k, "k"), (v, "v")))
            return sdpa_attention_forward(module, q, k, v, mask, **options)

        kind = f"rounded-{path.name}"
        AttentionInterface.register(kind, attend)
        AttentionMaskInterface.register(kind, sdpa_mask)
        self.model.set_attn_implementation(kind)


def engine(path: Path, **settings: Any) -> Any:
    arguments = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 160,
        "max_num_seqs": 4,
        "kv_cache_dtype": "fp8",
        "additional_config": BUCKETS,
        **settings,
    }
    return launch.engine(path, **arguments)


def agree(ours: list[int], reference: Reference) -> bool:
    """Equal, or equal up to two tokens that are nearly as good: a number between two of the format falls either way."""
    for mine, theirs, gap in zip(ours, reference.tokens, reference.gaps, strict=True):
        if mine != theirs:
            return gap < 30 * TIE
    return True


def check(llm: Any, oracle: RoundedOracle, prompts: list[list[int]], count: int) -> list[Any]:
    outputs = generate(llm, prompts, count)
    references = [oracle.greedy(prompt, count) for prompt in prompts]
    for ours, reference in zip(tokens_of(outputs), references, strict=True):
        assert agree(ours, reference), (ours, reference.tokens)
    equal = [ours == reference.tokens for ours, reference in zip(tokens_of(outputs), references, strict=True)]
    assert sum(equal) > len(equal) / 2
    return outputs


PROMPTS = prompts_of((1, 7, 33, 100, 64, 20), seed=71)


@pytest.mark.parametrize("name", [pytest.param("llama3", marks=pytest.mark.slow), "gemma3"])
def test_tokens_are_those_of_rounded_keys_and_values(
    name: str, tiny: Callable[..., Path], tmp_path: Path, oracle: Any
) -> None:
    """Chunks of 48 tokens, windows, packed requests, decode; then prefix hits."""
    path = scaled(tiny(name), tmp_path / name)
    reference = RoundedOracle(path)
    plain = oracle(tiny(name))
    assert any(reference.greedy(p, 20).tokens != plain.greedy(p, 20).tokens for p in PROMPTS), "rounding shows"
    with engine(path) as llm:
        check(llm, reference, PROMPTS, 20)
        again = check(llm, reference, PROMPTS, 20)
        assert again[3].num_cached_tokens > 0
        receipt = llm.collective_rpc("receipt")[0]
        assert receipt["kv_cache"]["dtype"] == "float8_e4m3fn"
        small = receipt["kv_cache"]["page_bytes"]
    with engine(path, kv_cache_dtype="auto") as llm:
        whole = llm.collective_rpc("receipt")[0]["kv_cache"]
    assert whole["dtype"] == "float32" and whole["page_bytes"] == 4 * small


@pytest.mark.slow
def test_compiled(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = scaled(tiny("gemma3"), tmp_path / "model")
    buckets = {"num_batched_tokens_buckets": [48], "num_seqs_buckets": [4]}
    with engine(path, enforce_eager=False, additional_config=buckets) as llm:
        check(llm, RoundedOracle(path), PROMPTS, 20)


@pytest.mark.slow
def test_pages_take_half_the_memory_of_bf16(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = scaled(tiny("gemma3"), tmp_path / "model")
    taken = []
    for dtype in ("fp8", "auto"):
        with engine(path, dtype="bfloat16", kv_cache_dtype=dtype) as llm:
            assert len(generate(llm, PROMPTS, 4)) == len(PROMPTS)
            taken.append(llm.collective_rpc("receipt")[0]["kv_cache"]["page_bytes"])
    assert 2 * taken[0] == taken[1]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = scaled(tiny("qwen3"), tmp_path / "model")
    with engine(path, tensor_parallel_size=2) as llm:
        check(llm, RoundedOracle(path), PROMPTS, 20)


def test_without_scales_it_is_refused_unless_asked_for(tiny: Callable[..., Path]) -> None:
    path = tiny("llama3")
    with pytest.raises(PilotageError, match=r"no scales of keys and values.*unscaled_fp8_kv_cache"), engine(path):
        pass
    with engine(path, additional_config={**BUCKETS, "unscaled_fp8_kv_cache": True}) as llm:
        check(llm, RoundedOracle(path), PROMPTS[:3], 12)


@pytest.mark.parametrize("dtype", ["fp8_e5m2", "int8_per_token_head"])
def test_other_formats_are_refused(dtype: str, tiny: Callable[..., Path]) -> None:
    with pytest.raises(PilotageError, match=f"{dtype}.*not implemented"), engine(tiny("llama3"), kv_cache_dtype=dtype):
        pass
