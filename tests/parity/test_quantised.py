"""Quantised checkpoints against transformers, which dequantises them itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from twins import BLOCK_SIZE, hf_logits, our_model, paged_logits, prompts

from pilotage.core.errors import PilotageError
from pilotage.models.common.paging import PagedSession
from pilotage.weights.dequantise import Mxfp4, ScaledFp8

Tiny = Callable[..., Path]
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def to_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[E, in, out] -> blocks [E, out, in / 32, 16] and scales [E, out, in / 32], nearest values."""
    groups = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    exponent = groups.abs().amax(-1, keepdim=True).clamp(min=1e-9).log2().floor() - 2
    scaled = groups / exponent.exp2()
    code = (scaled.abs()[..., None] - GRID).abs().argmin(-1) + 8 * (scaled < 0)
    code = code.to(torch.uint8)
    return code[..., 0::2] | (code[..., 1::2] << 4), (exponent[..., 0] + 127).to(torch.uint8)


def rewritten(path: Path, target: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    shutil.copytree(path, target)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((path / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(text))
    return target


@pytest.fixture(scope="module")
def mxfp4(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny("gpt_oss", hidden_size=64, intermediate_size=96)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = to_mxfp4(tensors.pop(name))
        tensors |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales.contiguous()}
    target = tmp_path_factory.mktemp("mxfp4") / "model"
    return rewritten(path, target, tensors, quantization_config={"quant_method": "mxfp4"})


def test_mxfp4_experts_are_those_of_transformers(mxfp4: Path) -> None:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    reference = AutoModelForCausalLM.from_pretrained(
        mxfp4,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        quantization_config=Mxfp4Config(dequantize=True),
    ).eval()
    ours = our_model(mxfp4)
    for index, layer in enumerate(ours.model.layers):
        theirs = reference.model.layers[index].mlp.experts
        assert torch.equal(layer.mlp.experts.gate_up_proj, theirs.gate_up_proj.float())
        assert torch.equal(layer.mlp.experts.down_proj, theirs.down_proj.float())
    streams = prompts((37, 6))
    session = PagedSession(model=ours, num_requests=4, max_tokens=96, block_size=BLOCK_SIZE)
    got = torch.cat(paged_logits(session, streams, chunk=13))
    expected = torch.cat(hf_logits(reference.float(), streams))
    torch.testing.assert_close(got, expected, rtol=0, atol=4e-5)


def test_mxfp4_extremes_are_exact() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    scales = torch.arange(100, 260 - 144 + 0, dtype=torch.uint8).view(1, 1, 16)
    (found,) = Mxfp4("w", "w").to_native([blocks, scales])
    signed = [*GRID.tolist(), *(-GRID).tolist()]
    expected = [
        signed[(byte & 15) if half == 0 else byte >> 4] * 2.0 ** (int(scales[0, 0, byte // 16]) - 127)
        for byte in range(256)
        for half in (0, 1)
    ]
    assert found.shape == (1, 512, 1)
    assert found.flatten().tolist() == expected


@pytest.mark.parametrize("kind", ["whole", "rows", "blocks"])
def test_fp8_is_the_product_with_its_scales(kind: str) -> None:
    weight = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scale = {"whole": torch.tensor(0.3), "rows": torch.rand(6, 1) + 0.1, "blocks": torch.rand(2, 3) + 0.1}[kind]
    rule = ScaledFp8("w", "s", "w", block=(4, 4) if kind == "blocks" else None)
    (found,) = rule.to_native([weight, scale])
    for row in range(6):
        for column in range(10):
            at: dict[str, tuple[int, ...]] = {"whole": (), "rows": (row, 0), "blocks": (row // 4, column // 4)}
            assert found[row, column] == weight[row, column].float() * scale[at[kind]]
    with pytest.raises(PilotageError, match="scales"):
        rule.to_native([weight, torch.ones(5, 7)])


LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SCHEMES: dict[str, dict[str, Any]] = {
    "whole": {"quant_method": "fp8", "activation_scheme": "static"},
    "blocks": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]},
    "rows": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
        },
    },
}


def to_fp8(weight: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the 8-bit matrix, its scales, and what they stand for."""
    if kind == "whole":
        scale = grown = weight.abs().max() / 448
    elif kind == "rows":
        scale = grown = weight.abs().amax(1, keepdim=True) / 448
    else:
        rows, columns = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -columns % 16, 0, -rows % 16))
        scale = padded.unflatten(0, (-1, 16)).unflatten(2, (-1, 16)).abs().amax((1, 3)) / 448
        grown = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)[:rows, :columns]
    small = (weight / grown).to(torch.float8_e4m3fn)
    return small, scale.contiguous(), small.float() * grown


@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_fp8_checkpoint_equals_the_model_of_its_values(name: str, kind: str, tiny: Tiny, tmp_path: Path) -> None:
    path = tiny(name)
    tensors = load_file(path / "model.safetensors")
    plain, small = dict(tensors), dict(tensors)
    ending = "weight_scale_inv" if kind == "blocks" else "weight_scale"
    for key in [key for key in tensors if key.split(".")[-2] in LINEARS]:
        module = key.removesuffix(".weight")
        small[key], small[f"{module}.{ending}"], plain[key] = to_fp8(tensors[key], kind)
        if kind == "whole":
            small[f"{module}.input_scale"] = torch.tensor(0.1)
    quantised = rewritten(path, tmp_path / "fp8", small, quantization_config=SCHEMES[kind])
    expected = our_model(rewritten(path, tmp_path / "plain", plain))
    got = our_model(quantised)
    assert got.state_dict().keys() == expected.state_dict().keys()
    for key, tensor in expected.state_dict().items():
        assert torch.equal(got.state_dict()[key], tensor), key
    assert not torch.equal(
        got.model.layers[0].mlp.down_proj.weight, our_model(path).model.layers[0].mlp.down_proj.weight
    )


EXPERTS = ("gate_proj", "up_proj", "down_proj")
LATENTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


def block_fp8(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a checkpoint's tensors with all linear layers in 8 bits, as published, and the values they stand for."""
    tensors = load_file(path / "model.safetensors")
    small, plain = dict(tensors), dict(tensors)
    for key in [key for key in tensors if key.split(".")[-2] in (*LINEARS, *EXPERTS, *LATENTS)]:
        module = key.removesuffix(".weight")
        small[key], small[f"{module}.weight_scale_inv"], plain[key] = to_fp8(tensors[key], "blocks")
    return small, plain


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe"])
def test_block_fp8_experts_equal_the_model_of_their_values(name: str, tiny: Tiny, tmp_path: Path) -> None:
    path = tiny(name)
    small, plain = block_fp8(path)
    assert sum(key.endswith("experts.2.up_proj.weight_scale_inv") for key in small) >= 2
    got = our_model(rewritten(path, tmp_path / "fp8", small, quantization_config=SCHEMES["blocks"]))
    expected = our_model(rewritten(path, tmp_path / "plain", plain)).state_dict()
    assert got.state_dict().keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(got.state_dict()[key], tensor), key


def test_malformed_block_scales_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    path = tiny("deepseek_v3")
    small, _ = block_fp8(path)
    name = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"
    config = SCHEMES["blocks"]
    wrong = {**small, name: small[name][:-1].contiguous()}
    with pytest.raises(PilotageError, match=r"experts\.3\.up_proj\.weight_scale_inv.*scales"):
        our_model(rewritten(path, tmp_path / "short", wrong, quantization_config=config))
    lacking = {key: tensor for key, tensor in small.items() if key != name}
    with pytest.raises(PilotageError, match=r"experts"):
        our_model(rewritten(path, tmp_path / "lacking", lacking, quantization_config=config))
    for number, block in enumerate(([16], [16, 0], 16)):
        odd = {**config, "weight_block_size": block}
        with pytest.raises(PilotageError, match="weight_block_size"):
            our_model(rewritten(path, tmp_path / f"odd{number}", small, quantization_config=odd))


def test_fp8_without_scales_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    path = tiny("llama3")
    tensors = load_file(path / "model.safetensors")
    for key in [key for key in tensors if key.split(".")[-2] in LINEARS]:
        tensors[key] = tensors[key].to(torch.float8_e4m3fn)
    bare = rewritten(path, tmp_path / "bare", tensors, quantization_config=SCHEMES["whole"])
    with pytest.raises(PilotageError, match="weight_scale"):
        our_model(bare)


@pytest.mark.parametrize("config", [{"quant_method": "awq"}, {"quant_method": "compressed-tensors", "format": "pack"}])
def test_other_quantisation_is_refused(config: dict[str, Any], tiny: Tiny, tmp_path: Path) -> None:
    path = tiny("llama3")
    tensors = load_file(path / "model.safetensors")
    with pytest.raises(PilotageError, match="quantization_config"):
        our_model(rewritten(path, tmp_path / "other", tensors, quantization_config=config))
