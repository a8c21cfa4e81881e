"""Quantised checkpoints through vLLM: the tokens of the plain checkpoint that holds the same values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import generate, prompts_of, tokens_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from pilotage.core.errors import PilotageError
from pilotage.serving import launch
from pilotage.weights.dequantise import Mxfp4, ScaledFp8

pytestmark = pytest.mark.engine

Checkpoints = tuple[Path, Path]


def served(path: Path, ranks: int) -> list[list[int]]:
    # vLLM itself refuses fp32 for these methods.
    with launch.engine(
        path,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        tensor_parallel_size=ranks,
        additional_config={"num_batched_tokens_buckets": [64], "num_seqs_buckets": [4]},
    ) as llm:
        return tokens_of(generate(llm, prompts_of((3, 33, 60), seed=6), 12))


def saved(path: Path, target: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    shutil.copytree(path, target)
    save_file({name: t.contiguous() for name, t in tensors.items()}, target / "model.safetensors", {"format": "pt"})
    text = json.loads((path / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(text))
    return target


def mxfp4(path: Path, root: Path) -> Checkpoints:
    """Random bytes for the experts, and the checkpoint of their values."""
    plain = load_file(path / "model.safetensors")
    quantised = dict(plain)
    draw = torch.Generator().manual_seed(0)
    for name in [name for name in plain if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, rows, columns = quantised.pop(name).shape
        blocks = torch.randint(256, (experts, columns, rows // 32, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(122, 125, (experts, columns, rows // 32), generator=draw, dtype=torch.uint8)
        quantised |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = Mxfp4(name, name).to_native([blocks, scales])[0].to(plain[name].dtype)
    scheme = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return saved(path, root / "plain", plain), saved(path, root / "mxfp4", quantised, quantization_config=scheme)


def fp8(path: Path, root: Path) -> Checkpoints:
    """Blocks of 16 by 16 with a scale each, and the checkpoint of their values."""
    plain = load_file(path / "model.safetensors")
    quantised = dict(plain)
    for name in [name for name in plain if name.endswith("_proj.weight")]:
        grid = [-(-size // 16) for size in plain[name].shape]
        scale = torch.linspace(0.001, 0.02, grid[0] * grid[1]).reshape(grid)
        wide = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)[: plain[name].shape[0], : plain[name].shape[1]]
        small = (plain[name].float() / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        quantised |= {name: small, f"{name}_scale_inv": scale}
        plain[name] = ScaledFp8("w", "s", "w", (16, 16)).to_native([small, scale])[0].to(plain[name].dtype)
    scheme = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    return saved(path, root / "plain", plain), saved(path, root / "fp8", quantised, quantization_config=scheme)


KINDS: dict[str, tuple[Callable[[Path, Path], Checkpoints], str, dict[str, int]]] = {
    "mxfp4": (mxfp4, "gpt_oss", {"hidden_size": 64, "intermediate_size": 96}),
    "fp8": (fp8, "llama3", {}),
}


@pytest.mark.parametrize("kind", ["mxfp4", pytest.param("fp8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=[pytest.mark.slow, pytest.mark.distributed])])
def test_tokens_are_those_of_the_same_values_unquantised(
    kind: str, ranks: int, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    make, name, overrides = KINDS[kind]
    plain, quantised = make(tiny(name, **overrides), tmp_path)
    tokens = served(quantised, ranks)
    assert len({tuple(some) for some in tokens}) > 1, "prompts differ, and so must their answers"
    assert tokens == served(plain, ranks)


def test_an_architecture_that_does_not_dequantise_is_refused_at_start(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    path = tiny("mixtral")
    tensors = load_file(path / "model.safetensors")
    quantised = saved(
        path, tmp_path / "fp8", tensors, quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"}
    )
    with pytest.raises(PilotageError, match=r"'fp8' is not implemented by this model"):
        served(quantised, 1)
