"""Keys and values as 8-bit floats: the operators against plain arithmetic, the scales, and the memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import pilotage.functional as NF
from pilotage.core.errors import ConfigError, Unsupported, WeightError
from pilotage.models.common.kv import LayerSpec
from pilotage.models.common.paging import PagedSession
from pilotage.serving import kv, kv_scales

HEADS, KV_HEADS, SIZE, BLOCK = 6, 2, 20, 4
K_SCALE, V_SCALE = torch.tensor(0.031), torch.tensor(0.24)
# Every finite number of the format, from its definition: sign, 4 bits of exponent, 3 of mantissa.
GRID = torch.tensor(
    [
        sign * (2.0**-6 * m / 8 if e == 0 else 2.0 ** (e - 7) * (1 + m / 8))
        for sign in (1, -1)
        for e in range(16)
        for m in range(8)
        if (e, m) != (15, 7)
    ],
    dtype=torch.float64,
)


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    """What a cache makes of x, in double: the nearest number of the format, times the scale."""
    wanted = (x.float() / scale).double()
    return GRID[(wanted[..., None] - GRID).abs().argmin(-1)] * scale.double()


def test_rounding_is_to_the_nearest_of_the_format_and_bounded() -> None:
    x = torch.cat((torch.randn(400, generator=torch.Generator().manual_seed(0)) * 3, torch.tensor([1e4, -1e4, 0.0])))
    stored = NF.quantise_kv(x[:, None, None], K_SCALE)
    assert stored.dtype == torch.float8_e4m3fn and stored.shape == (403, 1, 1)
    found = stored.flatten().double() * K_SCALE.double()
    torch.testing.assert_close(found, rounded(x, K_SCALE), rtol=0, atol=0)
    assert found.abs().max() == 448 * K_SCALE.double()
    assert NF.quantise_kv(torch.full((1, 1, 1), torch.nan), K_SCALE).isnan().all()


def attend_slowly(q_NH: Tensor, k_SKH: Tensor, v_SKH: Tensor, softcap: float | None, sinks: Tensor | None) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k_SKH, v_SKH))
    logits = torch.einsum("nh,snh->ns", q_NH.double(), k) * 0.3
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if sinks is not None:
        logits = torch.cat((logits, sinks.double()[:, None]), dim=1)
    return torch.einsum("ns,snh->nh", logits.softmax(-1)[:, : k.shape[0]], v)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 5},
    "softcap, sinks": {"softcap": 2.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0, -2.0])},
}


@pytest.mark.parametrize("implementation", ["torch", "sdpa"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("operator", ["segmented_attention", "attention_decode"])
def test_attention_reads_what_was_rounded(operator: str, options: dict[str, Any], implementation: str) -> None:
    draw = torch.Generator().manual_seed(1)
    lengths, new = [13, 6, 9], [1, 1, 1] if operator == "attention_decode" else [7, 6, 2]
    table = (torch.randperm(12, generator=draw) + 1).view(3, 4).int()
    pages = [torch.full((13, KV_HEADS, BLOCK, SIZE), torch.nan).to(torch.float8_e4m3fn) for _ in range(2)]
    k, v = ([torch.randn(n, KV_HEADS, SIZE, generator=draw) for n in lengths] for _ in range(2))
    q = [torch.randn(n, HEADS, SIZE, generator=draw) for n in new]
    for row, length in enumerate(lengths):
        at = torch.arange(length)
        slots = table[row][at // BLOCK].long() * BLOCK + at % BLOCK
        stored = NF.quantise_kv(k[row], K_SCALE), NF.quantise_kv(v[row], V_SCALE)
        NF.write_kv(*pages, *stored, slot_mapping=slots)
    spans = [(row, length - count, length) for row, (length, count) in enumerate(zip(lengths, new, strict=True))]
    with NF.forced({operator: implementation}):
        got = getattr(NF, operator)(
            torch.cat(q),
            *pages,
            block_table=table,
            token_to_req=torch.tensor([row for row, start, end in spans for _ in range(start, end)]).int(),
            positions=torch.cat([torch.arange(start, end) for _, start, end in spans]).int(),
            query_start_loc=torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()]).int(),
            seq_lens=torch.tensor(lengths).int(),
            scale=0.3,
            k_scale=K_SCALE,
            v_scale=V_SCALE,
            **({} if operator == "attention_decode" else {"kv_segment_size": 0}),
            **options,
        )
    expected = []
    for row, start, end in spans:
        keys, values = rounded(k[row], K_SCALE), rounded(v[row], V_SCALE)
        for at in range(start, end):
            seen = slice(max(0, at - options.get("window", 99) + 1), at + 1)
            query = q[row][at - start]
            expected.append(
                attend_slowly(query, keys[seen], values[seen], options.get("softcap"), options.get("sinks"))
            )
    torch.testing.assert_close(got.double(), torch.stack(expected), rtol=0, atol=2e-6)


def test_the_compiled_kernel_leaves_such_pages_to_others() -> None:
    pages = torch.zeros(2, 1, 4, 8, dtype=torch.float8_e4m3fn)
    ints = torch.zeros(1, dtype=torch.int32)
    said = NF.explain(
        "attention_decode",
        torch.zeros(1, 1, 8),
        pages,
        pages,
        block_table=ints[None],
        token_to_req=ints,
        positions=ints,
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=ints,
        scale=1.0,
        k_scale=K_SCALE,
        v_scale=V_SCALE,
    )
    assert said["implementation"] == "sdpa", said


@pytest.mark.parametrize("dtype, share", [(torch.bfloat16, 2), (torch.float32, 4)])
def test_a_page_takes_a_share_of_the_memory(dtype: torch.dtype, share: int) -> None:
    plain, small = (
        kv.cache_specs([LayerSpec("a", 2, 20, some, None), LayerSpec("b", 2, 20, some, 16)], BLOCK)
        for some in (dtype, torch.float8_e4m3fn)
    )
    for name in ("a", "b"):
        assert plain[name].page_size_bytes == share * small[name].page_size_bytes


def with_scales(path: Path, target: Path, **values: float | Tensor) -> Path:
    """Copy a checkpoint and add scales: "model.layers.0.self_attn.k_scale" for `k0`, and so on."""
    import shutil

    shutil.copytree(path, target)
    tensors = load_file(path / "model.safetensors")
    for name, value in values.items():
        tensors[f"model.layers.{name[1:]}.self_attn.{name[0]}_scale"] = torch.as_tensor(value, dtype=torch.float32)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def served(path: Path) -> Any:
    from transformers import AutoConfig

    from pilotage.models import registry

    config = AutoConfig.from_pretrained(path)
    entry = registry.find(config.architectures)
    assert entry is not None
    with torch.device("meta"):
        model = entry.load().from_configs(config)
    model.load_weights(path)
    return model


def layers_of(path: Path) -> int:
    return int(json.loads((path / "config.json").read_text())["num_hidden_layers"])


def test_every_layer_gets_its_own_scales(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny("llama3")
    count = layers_of(path)
    stated = {f"{kind}{n}": 0.01 * (n + 1) + (0.1 if kind == "v" else 0.0) for n in range(count) for kind in "kv"}
    model = served(with_scales(path, tmp_path / "scaled", **stated))
    kv_scales.attach(model, tmp_path / "scaled", unscaled=False)
    for n, layer in enumerate(model.model.layers):
        assert float(layer.self_attn.k_scale) == pytest.approx(stated[f"k{n}"])
        assert float(layer.self_attn.v_scale) == pytest.approx(stated[f"v{n}"])
    assert {layer.dtype for layer in model.get_kv_spec().layers} == {torch.float8_e4m3fn}
    assert not [name for name in model.state_dict() if "scale" in name], "scales are the cache's, not the weights'"


def test_scales_by_other_names_and_wrong_ones(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny("llama3")
    where = {"layers.0.self_attn": "model.layers.0.self_attn"}
    tensors = load_file(path / "model.safetensors")
    for number, (k, v) in enumerate(zip(*(kv_scales.KV_SCALES[kind] for kind in "kv"), strict=True)):
        added = {
            f"model.layers.0.self_attn.{k}": torch.tensor([0.5]),
            f"model.layers.0.self_attn.{v}": torch.tensor(2.0),
        }
        target = tmp_path / str(number)
        target.mkdir()
        save_file(tensors | added, target / "model.safetensors")
        assert kv_scales.read(target, where) == {
            ("layers.0.self_attn", "k"): 0.5,
            ("layers.0.self_attn", "v"): 2.0,
        }
    for name, value, said in (
        ("nan", torch.tensor(torch.nan), "nan is no scale"),
        ("zero", torch.tensor(0.0), "0.0 is no scale"),
        ("heads", torch.ones(2), r"\[2\] scales; one a layer"),
    ):
        with pytest.raises(WeightError, match=said):
            kv_scales.read(with_scales(path, tmp_path / name, k0=value, v0=1.0), where)
    with pytest.raises(WeightError, match=r"model.layers.0.self_attn.v_scale.*1 scales are missing"):
        kv_scales.read(with_scales(path, tmp_path / "half", k0=0.5), where)


def test_no_scales_is_an_error_unless_asked_for(tiny: Callable[..., Path]) -> None:
    model = served(tiny("gemma3"))
    with pytest.raises(ConfigError, match="unscaled_fp8_kv_cache"):
        kv_scales.attach(model, tiny("gemma3"), unscaled=False)
    kv_scales.attach(model, tiny("gemma3"), unscaled=True)
    assert {float(layer.self_attn.v_scale) for layer in model.model.layers} == {1.0}


def test_latent_rows_are_not_rounded(tiny: Callable[..., Path]) -> None:
    with pytest.raises(Unsupported, match="does not cache 8-bit floats"):
        kv_scales.attach(served(tiny("deepseek_v3")), tiny("deepseek_v3"), unscaled=True)


@pytest.mark.parametrize("name", ["llama3", "gemma3", "gemma4", "gpt_oss"])
def test_logits_do_not_depend_on_how_the_prompt_is_cut(name: str, tiny: Callable[..., Path]) -> None:
    """Whole and fresh, in chunks, token by token: every key is read back as it was rounded."""
    model = served(tiny(name))
    kv_scales.attach(model, tiny(name), unscaled=True)
    ids = torch.randint(5, 300, (41,), generator=torch.Generator().manual_seed(3)).tolist()
    found = []
    for chunks, options in (([41], {"fresh": True}), ([17, 24], {}), ([1] * 41, {"decode": True})):
        session = PagedSession(model=model, num_requests=1, max_tokens=48, block_size=BLOCK)
        assert session.pages["layers.0.self_attn"][0].dtype == torch.float8_e4m3fn
        parts = torch.tensor(ids).split(chunks)
        found.append(torch.cat([session.step({0: part.tolist()}, **options)[0] for part in parts]))
    session = PagedSession(model=served(tiny(name)), num_requests=1, max_tokens=48, block_size=BLOCK)
    effect = (session.step({0: ids})[0] - found[0]).square().mean().sqrt()
    assert effect > 2e-3, "the rounding shows"
    for other in found[1:]:
        # Not zero: what lies between two numbers of the format may fall to either side.
        assert (other - found[0]).square().mean().sqrt() < 0.03 * effect
