"""Public NKI kernels, unmodified, from a folder that PILOTAGE_PUBLIC_KERNELS names.

The folder holds checkouts of the public repositories nki-samples and nki-library under these names. None of it is kept
here. The errors bound what was seen; docs/kernels-nki.md has the table.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

VARIABLE = "PILOTAGE_PUBLIC_KERNELS"
ROOT = Path(os.environ.get(VARIABLE, ""))
SAMPLES, LIBRARY = ROOT / "nki-samples", ROOT / "nki-library" / "src"
pytestmark = pytest.mark.skipif(
    not os.environ.get(VARIABLE), reason=f"{VARIABLE} names no folder with nki-samples and nki-library"
)
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make `import nki` find the interpreter, and the library's package importable."""
    from pilotage.kernels.nki import install

    monkeypatch.setenv("NKI_SIMULATOR", "1")
    assert install()
    monkeypatch.syspath_prepend(str(LIBRARY))
    torch.manual_seed(0)
    yield


def sample(path: str) -> types.ModuleType:
    """Load a file of nki-samples; what it runs when it is imported as a script is left out."""
    file = SAMPLES / path
    if not file.is_file():
        pytest.skip(f"{file} is not there")
    source = file.read_text().replace('\ntest_attn_tutorial("accuracy", attn_fwd_v1)', "\n")
    module = types.ModuleType(file.stem)
    exec(compile(source, str(file), "exec"), module.__dict__)
    return module


def library(name: str) -> Any:
    """Import a module of nki-library."""
    if not LIBRARY.is_dir():
        pytest.skip(f"{LIBRARY} is not there")
    return importlib.import_module(f"nkilib_src.nkilib.core.{name}")


def close(label: str, ours: Any, truth: Any, within: float, started: float) -> None:
    """Hold the relative L2 error below a bound, and say what it was."""
    a, b = (
        torch.as_tensor(np.asarray(one, np.float32) if not isinstance(one, Tensor) else one).float()
        for one in (ours, truth)
    )
    a = a.reshape(b.shape)
    worst, relative = float((a - b).abs().max()), float((a - b).norm() / b.norm())
    print(
        f"\n| {label} | {worst:.1e} | {relative:.1e} | {time.perf_counter() - started:.2f} |", end="", file=sys.stderr
    )
    assert relative < within


_TUTORIALS = "src/nki_samples/tutorials"
_TILINGS = {
    "basic": (128, 64, 512),
    "tiled": (256, 256, 1024),
    "hoist_load": (256, 256, 1024),
    "block_free_dimension": (256, 256, 1024),
    "fully_optimized": (1024, 2048, 1024),
}


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tiling", _TILINGS)
def test_sample_matmul(tiling: str, dtype: Any) -> None:
    kernel = getattr(
        sample(f"{_TUTORIALS}/matrix_multiplication/matrix_multiplication_nki_kernels.py"), f"nki_matmul_{tiling}_"
    )
    k, m, n = _TILINGS[tiling]
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((k, m)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)
    started = time.perf_counter()
    out = kernel(a, b)
    wide = a.astype(np.float32).T @ b.astype(np.float32)
    close(
        f"nki-samples matmul {tiling} {np.dtype(dtype).name}",
        out.astype(np.float32),
        wide,
        1e-6 if dtype is np.float32 else 5e-3,
        started,
    )


@pytest.mark.parametrize("version", ["v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v8a", "v9", "v10", "v11"])
def test_sample_attention(version: str) -> None:
    kernel = getattr(sample(f"{_TUTORIALS}/attention_fwd_performance/attention_kernels.py"), f"attn_fwd_{version}")
    length = 128 if version in ("v1", "v2") else 1024
    q, k, v = (np.random.default_rng(at).uniform(-1, 1, (128, length)).astype(np.float32) for at in range(3))
    logits = q.T @ k
    weights = np.exp(logits - logits.max(1, keepdims=True))
    started = time.perf_counter()
    out = kernel(q, k, v)
    low = int(version[1:].rstrip("a")) >= 7  # these keep their weights in bf16
    close(
        f"nki-samples attention {version}",
        out.astype(np.float32),
        weights / weights.sum(1, keepdims=True) @ v.T,
        8e-3 if low else 1e-5,
        started,
    )


def test_samples_are_estimated_in_the_known_order() -> None:
    from pilotage.kernels.nki import estimate

    kernels = sample(f"{_TUTORIALS}/matrix_multiplication/matrix_multiplication_nki_kernels.py")
    operands = [np.ones(shape, ml_dtypes.bfloat16) for shape in ((1024, 2048), (1024, 1024))]
    told = {name: estimate(getattr(kernels, f"nki_matmul_{name}_"), operands) for name in list(_TILINGS)[1:]}
    for name, one in told.items():
        figures = (
            f"{one.lower_s * 1e6:.0f}",
            f"{one.upper_s * 1e6:.0f}",
            f"{one.dma_bytes / 1e6:.1f}",
            str(one.dma_runs),
        )
        print(f"\n| {name} | {' | '.join(figures)} | {one.bound_by} |", end="", file=sys.stderr)
    tiled, hoisted, blocked, optimized = told.values()
    assert tiled.dma_bytes >= hoisted.dma_bytes > blocked.dma_bytes > optimized.dma_bytes
    assert tiled.lower_s > hoisted.lower_s > blocked.lower_s > optimized.lower_s


def _launched(kernel: Any, cores: int) -> Any:
    from pilotage.kernels.nki import jit

    made = jit(kernel)
    return made[cores] if cores > 1 else made


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize(("dtype", "contiguous"), [(torch.float32, True), (torch.float32, False), (BF16, True)])
def test_library_rope(dtype: torch.dtype, contiguous: bool, cores: int) -> None:
    x, cos, sin = torch.randn(64, 2, 3, 96).to(dtype), torch.rand(32, 2, 96).to(dtype), torch.rand(32, 2, 96).to(dtype)
    started = time.perf_counter()
    out = _launched(library("embeddings.rope").RoPE, cores)(
        x, cos, sin, lnc_shard=cores == 2, contiguous_layout=contiguous
    )
    first, second = (x[:32], x[32:]) if contiguous else (x[0::2], x[1::2])
    c, s = cos[:, :, None].float(), sin[:, :, None].float()
    turned = (first.float() * c - second.float() * s, second.float() * c + first.float() * s)
    truth = torch.cat(turned) if contiguous else torch.stack(turned, 1).flatten(0, 1)
    close(
        f"nkilib RoPE {dtype} contiguous={contiguous} [{cores}]",
        out,
        truth,
        1e-6 if dtype is torch.float32 else 5e-3,
        started,
    )


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_library_cumsum(dtype: torch.dtype) -> None:
    x = torch.randn(3, 70, 600).to(dtype)
    started = time.perf_counter()
    out = library("cumsum.cumsum").cumsum(x)
    close(f"nkilib cumsum {dtype}", out, x.float().cumsum(-1), 1e-6 if dtype is torch.float32 else 5e-3, started)


@pytest.mark.parametrize("cores", [1, 2])
def test_library_rmsnorm_quant(cores: int) -> None:
    module = library("rmsnorm.rmsnorm_quant")
    x, weight = torch.randn(1, 200, 512).to(BF16), (torch.rand(512) + 0.5).to(BF16)
    options = module.RmsNormQuantKernelArgs(lower_bound=0.0, norm_type=library("utils.common_types").NormType.RMS_NORM)
    started = time.perf_counter()
    raw = _launched(module.rmsnorm_quant_kernel, cores)(x, weight.reshape(1, 512), options).view(torch.uint8).numpy()
    quantised = np.ascontiguousarray(raw[..., :512]).view(ml_dtypes.float8_e4m3).astype(np.float32)
    scales = np.ascontiguousarray(raw[..., 512:]).view(np.float32)
    wide = x.float()
    truth = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()
    close(f"nkilib RMSNorm-quant row fp8 [{cores}]", quantised * scales, truth, 4e-2, started)


_PREFILL: list[tuple[str, dict[str, Any]]] = [
    ("fp32", {"dtype": torch.float32}),
    ("bf16", {}),
    ("bf16 d128 tp_k", {"size": 128, "tp_k": True}),
    ("bf16 window", {"length": 512, "sliding_window": 100}),
    ("bf16 sink", {"sink": True}),
    ("bf16 tp_out", {"tp_out": True}),
    ("bf16 not causal", {"causal_mask": False}),
    ("bf16 two cores", {"cores": 2}),
    ("bf16 S=1024 d128", {"length": 1024, "size": 128, "batch": 1}),
]


@pytest.mark.parametrize(("label", "form"), _PREFILL, ids=[label for label, _ in _PREFILL])
def test_library_attention_prefill(label: str, form: dict[str, Any]) -> None:
    options = dict(form)
    dtype, length, size = options.pop("dtype", BF16), options.pop("length", 256), options.pop("size", 64)
    batch, cores, sink = options.pop("batch", 2), options.pop("cores", 1), options.pop("sink", False)
    q, k, v = torch.randn(batch, length, size) / size**0.5, torch.randn(1, length, size), torch.randn(1, length, size)
    q, k, v = (one.to(dtype) for one in (q, k, v))
    extra = torch.randn(batch, 1).to(dtype) if sink else None
    kernel = _launched(library("attention.attention_cte").attention_cte, cores)
    started = time.perf_counter()
    out = kernel(q, k if options.get("tp_k") else k.transpose(1, 2).contiguous(), v, sink=extra, **options)
    assert time.perf_counter() - started < 60
    at = torch.arange(length)
    seen = torch.ones(length, length, dtype=torch.bool)
    if options.get("causal_mask", True):
        seen = at[None] <= at[:, None]
    if "sliding_window" in options:
        seen = seen & (at[None] > at[:, None] - options["sliding_window"])
    logits = (q.float() @ k.float().transpose(1, 2)).masked_fill(~seen, -torch.inf)
    if extra is not None:
        logits = torch.cat((logits, extra.float()[:, :, None].expand(-1, length, 1)), -1)
    truth = torch.softmax(logits, -1)[..., :length] @ v.float()
    close(
        f"nkilib attention_cte {label}", out, truth.transpose(1, 2) if options.get("tp_out") else truth, 4e-3, started
    )


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("window", [0, 100])
def test_library_attention_decode(cores: int, window: int) -> None:
    """One new token of each request against a flat cache, its mask made in the kernel from positions."""
    module = library("attention.attention_tkg")
    config = library("attention.attention_tkg_utils").AttnTKGConfig
    manager, logger = library("utils.allocator").SbufManager, library("utils.logging").Logger
    batch, heads, length, size = 4, 4, 512, 64
    from pilotage.kernels.nki import language as nl

    def entry(q: Any, k_new: Any, v_new: Any, k_old: Any, v_old: Any, mask: Any, places: Any, starts: Any) -> Any:
        memory = manager(0, nl.tile_size.total_available_sbuf_size - 16 * 1024, logger("SBM"))
        memory.open_scope()
        out = nl.ndarray((batch, heads, size, 1), q.dtype, nl.shared_hbm)
        cfg = config(
            bs=batch, q_head=heads, s_active=1, curr_sprior=length, full_sprior=length, d_head=size, tp_k_prior=True,
            strided_mm1=False, use_pos_id=True, qk_in_sb=True,
        )  # fmt: skip
        from pilotage.kernels.nki import isa as nisa

        loaded = []
        for one in (q, k_new):
            tile = memory.alloc_stack(one.shape, dtype=one.dtype, buffer=nl.sbuf)
            nisa.dma_copy(tile, one)
            loaded.append(tile)
        module.attention_tkg(
            loaded[0], loaded[1], v_new, k_old, v_old, mask, out, cfg, memory, rope_pos_ids=places, start_pos_ids=starts
        )
        memory.close_scope()
        return out

    places = torch.tensor([[300], [37], [500], [129]], dtype=torch.int32)
    q = (torch.randn(batch, heads, size) / size**0.5).to(BF16)
    k_new, v_new = torch.randn(batch, size).to(BF16), torch.randn(batch, 1, 1, size).to(BF16)
    k_old, v_old = torch.randn(batch, 1, length, size).to(BF16), torch.randn(batch, 1, length, size).to(BF16)
    mask = torch.ones(1, batch, heads, 1, dtype=torch.uint8)
    starts = (places - window + 1).clamp(min=0).to(torch.int32) if window else None
    started = time.perf_counter()
    out = _launched(entry, cores)(
        q.permute(2, 0, 1).reshape(size, -1).contiguous(), k_new.T.contiguous(), v_new, k_old, v_old, mask,
        places.float(), None if starts is None else starts.float(),
    )  # fmt: skip
    truth = torch.empty(batch, heads, size)
    for at in range(batch):
        place = int(places[at])
        first = int(starts[at]) if starts is not None else 0
        keys = torch.cat((k_old[at, 0, first:place], k_new[at : at + 1])).float()
        values = torch.cat((v_old[at, 0, first:place], v_new[at, 0])).float()
        truth[at] = torch.softmax(q[at].float() @ keys.T, -1) @ values
    close(f"nkilib attention_tkg window={window} [{cores}]", out, truth[..., None], 8e-3, started)


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("label", "batch", "length"), [("cte", 1, 256), ("tkg", 4, 1)])
def test_library_qkv(label: str, batch: int, length: int, norm: bool, cores: int) -> None:
    kinds = library("utils.common_types").NormType
    x, weight = torch.randn(batch, length, 512).to(BF16), (torch.randn(512, 384) / 512**0.5).to(BF16)
    gamma = (torch.rand(1, 512) + 0.5).to(BF16)
    options = {"fused_norm_type": kinds.RMS_NORM, "gamma_norm_weights": gamma} if norm else {}
    started = time.perf_counter()
    out = _launched(library("qkv.qkv").qkv, cores)(x, weight, **options)
    wide = x.float()
    if norm:
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * gamma.float()
    close(
        f"nkilib qkv {label} norm={norm} [{cores}]",
        out[0] if isinstance(out, tuple | list) else out,
        wide @ weight.float(),
        5e-3,
        started,
    )


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("phase", ["cte", "tkg"])
def test_library_output_projection(phase: str, cores: int) -> None:
    heads, size, width, batch, length = 4, 128, 1024, *((1, 512) if phase == "cte" else (2, 2))
    weight = (torch.randn(heads * size, width) / (heads * size) ** 0.5).to(BF16)
    values = torch.randn(batch, length, heads, size).to(BF16)
    if phase == "cte":
        module = library("output_projection.output_projection_cte.output_projection_cte").output_projection_cte
        given = values.permute(0, 2, 3, 1)
    else:
        module = library("output_projection.output_projection_tkg").output_projection_tkg
        given = values.permute(3, 0, 2, 1)
    started = time.perf_counter()
    out = _launched(module, cores)(given.contiguous(), weight)
    close(f"nkilib output_projection_{phase} [{cores}]", out, values.float().flatten(2) @ weight.float(), 5e-3, started)


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize(("phase", "length"), [("cte", 256), ("tkg", 4)])
def test_library_mlp(phase: str, length: int, cores: int) -> None:
    """Through the entries of both phases: the file that joins them does not compile at the version in the table."""
    parameters = library("mlp.mlp_parameters").MLPParameters
    kinds = library("utils.common_types")
    manager, logger = library("utils.allocator").SbufManager, library("utils.logging").Logger
    from pilotage.kernels.nki import language as nl

    def entry(x: Any, gate: Any, up: Any, down: Any) -> Any:
        given = parameters(
            hidden_tensor=x, gate_proj_weights_tensor=gate, up_proj_weights_tensor=up, down_proj_weights_tensor=down,
            normalization_weights_tensor=None, activation_fn=kinds.ActFnType.SiLU,
            normalization_type=kinds.NormType.NO_NORM,
        )  # fmt: skip
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm, name="out")
        if phase == "cte":
            library("mlp.mlp_cte.mlp_cte").mlp_cte(given, out, None)
        else:
            memory = manager(0, 200 * 1024, logger("mlp"))
            memory.set_name_prefix("mlp_")
            library("mlp.mlp_tkg.mlp_tkg").mlp_tkg(given, out, None, sbm=memory)
        return out

    x = torch.randn(1, length, 512).to(BF16)
    gate, up = ((torch.randn(512, 1024) / 512**0.5).to(BF16) for _ in range(2))
    down = (torch.randn(1024, 512) / 32).to(BF16)
    started = time.perf_counter()
    out = _launched(entry, cores)(x, gate, up, down)
    wide = torch.nn.functional.silu(x.float() @ gate.float()) * (x.float() @ up.float())
    close(f"nkilib mlp_{phase} [{cores}]", out, wide @ down.float(), 8e-3, started)


def test_library_router() -> None:
    module = library("router_topk.router_topk")
    tokens, width, experts, k = 8, 512, 16, 4
    x, weight = torch.randn(width, tokens).to(BF16), (torch.randn(width, experts) / width**0.5).to(BF16)
    logits, weights = torch.zeros(tokens, experts), torch.zeros(tokens, experts)
    places = torch.zeros(tokens, k, dtype=torch.int32).view(torch.uint32)
    softmax = library("utils.common_types").RouterActFnType.SOFTMAX
    started = time.perf_counter()
    _launched(module.router_topk, 2)(x, weight, None, logits, weights, places, softmax, k, 0, 0, router_pre_norm=False)
    truth = x.float().T @ weight.float()
    top = truth.topk(k, -1)
    close("nkilib router_topk logits [2]", logits, truth, 1e-6, started)
    expected = torch.zeros(tokens, experts).scatter(1, top.indices, torch.softmax(top.values, -1))
    close("nkilib router_topk affinities [2]", weights, expected, 1e-5, started)
    assert torch.equal(places.view(torch.int32).long(), top.indices)


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("every", [False, True], ids=["selected", "all"])
def test_library_moe_decode(every: bool, cores: int) -> None:
    tokens, width, inner, experts, k = 4, 512, 256, 8, 2
    x = torch.randn(tokens, width).to(BF16)
    gate_up = (torch.randn(experts, width, 2, inner) / width**0.5).to(BF16)
    down = (torch.randn(experts, inner, width) / inner**0.5).to(BF16)
    top = torch.randn(tokens, experts).topk(k, -1)
    chosen = torch.softmax(top.values, -1)
    weights = torch.zeros(tokens, experts).scatter(1, top.indices, chosen).to(BF16)
    options: dict[str, Any] = {"expert_affinities_eager": chosen.to(BF16)} if not every else {
        "rank_id": torch.zeros(1, 1, dtype=torch.int32), "mask_unselected_experts": False,
    }  # fmt: skip
    scaling = library("utils.common_types").ExpertAffinityScaleMode.POST_SCALE
    started = time.perf_counter()
    out = _launched(library("moe.moe_tkg.moe_tkg").moe_tkg, cores)(
        x, gate_up, down, weights, top.indices.to(torch.int32), every, expert_affinities_scaling_mode=scaling, **options
    )
    truth = torch.zeros(tokens, width)
    for token in range(tokens):
        for expert in range(experts):
            if weights[token, expert]:
                gate, up = (x[token].float() @ gate_up[expert, :, at].float() for at in (0, 1))
                truth[token] += weights[token, expert].float() * (
                    (torch.nn.functional.silu(gate) * up) @ down[expert].float()
                )
    close(f"nkilib moe_tkg {'all experts' if every else 'selected'} [{cores}]", out, truth, 1e-2, started)


@pytest.mark.parametrize("strategy", ["shard_on_block", "shard_on_i"])
def test_library_moe_prefill(strategy: str) -> None:
    """Tokens sorted into blocks of one expert each; a token that fills up a block is one past the last."""
    module = library("moe.moe_cte.moe_cte")
    tokens, width, inner, experts, k, block = 255, 512, 256, 4, 2, 256
    x = torch.cat((torch.randn(tokens, width), torch.zeros(1, width))).to(BF16)
    gate_up = (torch.randn(experts, width, 2, inner) / width**0.5).to(BF16)
    down = (torch.randn(experts, inner, width) / inner**0.5).to(BF16)
    top = torch.randn(tokens, experts).topk(k, -1)
    weights = torch.zeros(tokens + 1, experts)
    weights[:tokens].scatter_(1, top.indices, torch.softmax(top.values, -1))
    weights = weights.to(BF16)
    places, owners = [], []
    for expert in range(experts):
        mine = weights[:tokens, expert].nonzero()[:, 0]
        for start in range(0, len(mine), block):
            piece = mine[start : start + block]
            places.append(torch.nn.functional.pad(piece, (0, block - len(piece)), value=tokens))
            owners.append(expert)
    if len(owners) % 2:
        places.append(torch.full((block,), tokens))
        owners.append(0)
    spec = module.MoECTESpec(implementation=getattr(module.MoECTEImplementation, strategy))
    started = time.perf_counter()
    out = _launched(module.moe_cte, 2)(
        x, weights.reshape(-1, 1).contiguous(), gate_up, down, torch.cat(places).to(torch.int32),
        torch.tensor(owners, dtype=torch.int32).reshape(-1, 1), block, spec,
    )  # fmt: skip
    out = out[0] if isinstance(out, tuple | list) else out
    out = out.float()
    if out.ndim == 3:  # [T, 2, H]: the cores' shares, reduced into the first
        out = out[:, 0]
    truth = torch.zeros(tokens, width)
    for expert in range(experts):
        gate, up = (x[:tokens].float() @ gate_up[expert, :, at].float() for at in (0, 1))
        mlp = (torch.nn.functional.silu(gate) * up) @ down[expert].float()
        truth += weights[:tokens, expert : expert + 1].float() * mlp
    close(f"nkilib moe_cte {strategy} [2]", out.reshape(-1, width)[:tokens], truth, 1e-2, started)


@pytest.fixture
def microscaling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The kernels of the tutorial on microscaling, for the generation that has it."""
    folder = SAMPLES / _TUTORIALS / "mxfp-matmul"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("mx_kernels")
    for name in ("mx_kernels", "mx_kernel_utils"):
        sys.modules.pop(name, None)


def _exact(rng: Any, *shape: int) -> Any:
    """Numbers that every 8-bit type holds, whatever power of two its group is divided by."""
    return (rng.choice([1.0, 1.25, 1.5, 1.75], shape) * rng.choice([-1.0, 1.0], shape)).astype(np.float32)


_PACKED = {"float8_e4m3fn": np.uint32, "float8_e5m2": np.uint32, "float4_e2m1fn": np.uint16}


def _packed(rng: Any, kind: str, width: int) -> tuple[Any, Any, Any]:
    """Make [128, width] elements of four packed values, a scale for every 8 rows, and what they stand for."""
    if kind == "float4_e2m1fn":
        values = rng.choice([-6.0, -3.0, -1.5, -0.5, 0.5, 1.0, 2.0, 4.0], (128, width, 4)).astype(np.float32)
        nibbles = values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).astype(np.uint16)
        packed = (nibbles << np.array([0, 4, 8, 12], np.uint16)).sum(-1, dtype=np.uint16)
    else:
        values = _exact(rng, 128, width, 4)
        packed = values.astype(getattr(ml_dtypes, kind)).view(np.uint8).view(_PACKED[kind])[..., 0]
    scales = rng.integers(125, 130, (16, width)).astype(np.uint8)
    meant = values * np.exp2(scales.astype(np.float32) - 127).repeat(8, axis=0)[..., None]
    return packed, scales, meant


@pytest.mark.parametrize("kind", _PACKED)
def test_sample_microscaling_of_packed_operands(kind: str, microscaling: Any) -> None:
    from pilotage.kernels.nki import language as nl

    rng = np.random.default_rng(0)
    (a, a_scales, wide_a), (b, b_scales, wide_b) = _packed(rng, kind, 128), _packed(rng, kind, 512)
    started = time.perf_counter()
    out = microscaling.kernel_offline_quantized_mx_matmul(a, a_scales, b, b_scales, getattr(nl, f"{kind}_x4"))
    truth = np.einsum("pmv,pnv->mn", wide_a, wide_b)
    close(f"nki-samples microscaling matmul, packed {kind}", out.astype(np.float32), truth, 3e-3, started)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_sample_microscaling_quantised_in_the_kernel(kind: str, microscaling: Any) -> None:
    from pilotage.kernels.nki import language as nl

    rng = np.random.default_rng(0)
    a, a_scales, wide_a = _packed(rng, kind, 128)
    b = _exact(rng, 128, 2048)
    dtype = getattr(nl, f"{kind}_x4")
    started = time.perf_counter()
    out = microscaling.kernel_on_device_quantize_matmul_mx(a, a_scales, b.astype(ml_dtypes.bfloat16), dtype, dtype)
    truth = np.einsum("pmv,pnv->mn", wide_a, b.reshape(128, 512, 4))
    close(f"nki-samples microscaling matmul, moving quantised {kind}", out.astype(np.float32), truth, 3e-3, started)


@pytest.mark.parametrize("copied", [True, False], ids=["tensor_copy", "dma"])
def test_sample_microscaling_laid_out_by_strides(copied: bool, microscaling: Any) -> None:
    from pilotage.kernels.nki import language as nl

    rng = np.random.default_rng(0)
    a, b = (_exact(rng, 512, width) for width in (128, 512))
    started = time.perf_counter()
    out = microscaling.kernel_copy_strided_quantize_matmul_mx(
        a.astype(ml_dtypes.bfloat16), b.astype(ml_dtypes.bfloat16), nl.float8_e5m2_x4, copied
    )
    label = f"nki-samples microscaling matmul, both quantised, strided {'copy' if copied else 'DMA'}"
    close(label, out.astype(np.float32), a.T @ b, 3e-3, started)
