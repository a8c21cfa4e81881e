"""Our NKI kernels under the interpreter against the definitions, and what they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import pilotage.functional as NF
from pilotage.accuracy.testing import assert_close_three_way
from pilotage.kernels.nki import NkiValidationError, library, simulate

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def simulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NKI_SIMULATOR", "1")
    torch.manual_seed(0)
    yield


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def three_way(name: str, *args: Any, rows: slice = slice(None), **kwargs: Any) -> None:
    """Hold the kernel's error against float32 to the definition's own in the same dtype."""
    operator = getattr(NF, name)
    wide = operator(*map(_wide, args), **{key: _wide(value) for key, value in kwargs.items()})
    with NF.forced({name: "torch"}):
        same = operator(*args, **kwargs)
    with NF.forced({name: "nki"}):
        mine = operator(*args, **kwargs)
    for ours, theirs, truth in zip(_tuple(mine), _tuple(same), _tuple(wide), strict=True):
        assert ours.dtype is theirs.dtype and ours.shape == theirs.shape
        assert_close_three_way(ours[rows].float(), theirs[rows].float(), truth[rows].float(), rtol=3e-6)


def rand(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [{}, {"unit_offset": True}, {"round_once": True}])
@pytest.mark.parametrize("shape", [(1, 65), (130, 48), (2, 3, 7)])
def test_rms_norm(dtype: torch.dtype, form: dict[str, bool], shape: tuple[int, ...]) -> None:
    three_way("rms_norm", rand(*shape, dtype=dtype), rand(shape[-1], dtype=dtype), eps=1e-5, **form)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "size", "turned"), [((6, 2), 24, 24), ((3, 1), 20, 12)])
def test_rotary(dtype: torch.dtype, heads: tuple[int, int], size: int, turned: int) -> None:
    q, k = (rand(131, one, size, dtype=dtype) for one in heads)
    cos, sin = rand(131, turned, dtype=dtype), rand(131, turned, dtype=dtype)
    three_way("rotary", q, k, cos, sin)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_projections(dtype: torch.dtype, bias: bool) -> None:
    x, weight = rand(130, 150, dtype=dtype), rand(530, 150, dtype=dtype, scale=0.1)
    extra = rand(530, dtype=dtype) if bias else None
    three_way("qkv_proj", x, weight, extra, sizes=(400, 65, 65))
    three_way("o_proj", x[:1], weight, extra)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "gelu", "relu"])
def test_mlp(dtype: torch.dtype, activation: str) -> None:
    x, gate_up, down = rand(5, 65, dtype=dtype), rand(280, 65, dtype=dtype, scale=0.1), rand(65, 140, dtype=dtype)
    bias = (rand(280, dtype=dtype), rand(65, dtype=dtype)) if activation == "silu" else (None, None)
    three_way("mlp", x, gate_up, down, *bias, activation=activation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", ["softmax_topk", "topk_softmax"])
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (40, 11)])
def test_router(dtype: torch.dtype, rule: str, experts: int, top_k: int) -> None:
    x, weight = rand(9, 33, dtype=dtype), rand(experts, 33, dtype=dtype, scale=0.3)
    three_way("router_logits", x, weight)
    logits = NF.router_logits(x, weight)
    options = {"top_k": top_k, "rule": rule, "renormalize": True}
    with NF.forced({"expert_affinities": "torch"}):
        expected = NF.expert_affinities(logits, **options)
    with NF.forced({"expert_affinities": "nki"}):
        out = NF.expert_affinities(logits, **options)
    assert ((out > 0).sum(-1) == top_k).all()
    for row, ours, theirs in zip(logits, out, expected, strict=True):
        chosen = {float(row[at]) for at in ours.nonzero()[:, 0]}
        assert min(chosen) >= float(row.topk(top_k).values[-1])  # of equal logits either may be taken
        torch.testing.assert_close(ours.sort().values, theirs.sort().values, rtol=2e-5, atol=1e-6)


def _packed(lengths: list[int], padding: int) -> dict[str, Tensor]:
    requests = [at for at, length in enumerate(lengths) for _ in range(length)] + [0] * padding
    positions = [at for length in lengths for at in range(length)] + [0] * padding
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    return {
        "token_to_req": torch.tensor(requests, dtype=torch.int32),
        "positions": torch.tensor(positions, dtype=torch.int32),
        "query_start_loc": torch.tensor(starts, dtype=torch.int32),
    }


_FORMS: list[dict[str, Any]] = [
    {},
    {"window": 9},
    {"softcap": 3.0},
    {"sinks": True},
    {"window": 40, "softcap": 5.0, "sinks": True},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", _FORMS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 24), (3, 3, 20), (6, 1, 136)])
def test_flash_attention(dtype: torch.dtype, form: dict[str, Any], heads: int, kv_heads: int, size: int) -> None:
    lengths = [70, 1, 84] if size == 24 else [20, 7]
    options = dict(form, sinks=torch.randn(heads) if form.get("sinks") else None)
    packed, real = _packed(lengths, 3), sum(lengths)
    q, k, v = (rand(real + 3, one, size, dtype=dtype) for one in (heads, kv_heads, kv_heads))
    k[real:], v[real:] = float("nan"), float("nan")  # what pads the batch is nobody's
    three_way("flash_attention", q, k, v, **packed, scale=size**-0.5, rows=slice(0, real), **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", _FORMS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 24), (5, 1, 136)])
def test_attention_decode(dtype: torch.dtype, form: dict[str, Any], heads: int, kv_heads: int, size: int) -> None:
    lengths, slots, pages = [131, 5, 64], 16, 9
    caches = [torch.full((40, kv_heads, slots, size), float("nan"), dtype=dtype) for _ in range(2)]
    table = torch.randperm(39)[: 3 * pages].reshape(3, pages).to(torch.int32)
    for request, length in enumerate(lengths):
        for at in range(length):
            page, slot = int(table[request, at // slots]), at % slots
            for cache in caches:
                cache[page, :, slot] = rand(kv_heads, size, dtype=dtype)
    options = dict(form, sinks=torch.randn(heads) if form.get("sinks") else None)
    three_way(
        "attention_decode", rand(4, heads, size, dtype=dtype), *caches, block_table=table,
        token_to_req=torch.tensor([0, 1, 2, 0], dtype=torch.int32),
        positions=torch.tensor([130, 4, 63, 0], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 1, 2, 3], dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32), scale=size**-0.5, rows=slice(0, 3), **options,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv_writes_its_slots_and_nothing_else(dtype: torch.dtype) -> None:
    slots = torch.cat((torch.randperm(5 * 16)[: 131 % 80], torch.tensor([-1, -1])))
    k, v = rand(len(slots), 3, 20, dtype=dtype), rand(len(slots), 3, 20, dtype=dtype)
    start = [rand(5, 3, 16, 20, dtype=dtype) for _ in range(2)]
    results = []
    for name in ("torch", "nki"):
        caches = [one.clone() for one in start]
        with NF.forced({"write_kv": name}):
            NF.write_kv(*caches, k, v, slot_mapping=slots)
        results.append(caches)
    assert all(torch.equal(ours, theirs) for theirs, ours in zip(*results, strict=True))


def test_write_kv_of_padding_alone_leaves_the_cache() -> None:
    caches = [torch.randn(2, 1, 16, 8) for _ in range(2)]
    before = [one.clone() for one in caches]
    with NF.forced({"write_kv": "nki"}):
        NF.write_kv(*caches, torch.randn(3, 1, 8), torch.randn(3, 1, 8), slot_mapping=torch.full((3,), -1))
    assert all(map(torch.equal, caches, before))


def test_chosen_only_under_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    assert NF.explain("rms_norm", x, weight, eps=1e-6)["implementation"] == "nki"
    monkeypatch.delenv("NKI_SIMULATOR")
    told = NF.explain("rms_norm", x, weight, eps=1e-6)
    assert told["implementation"] == "torch"
    assert "NKI_SIMULATOR=1 runs it in the NKI interpreter" in told["refused"]["nki"]


def test_domains_say_why_not() -> None:
    wide = torch.randn(2, 8193)
    assert "D is 8193" in NF.explain("rms_norm", wide, torch.randn(8193), eps=1e-6)["refused"]["nki"]
    half = torch.randn(2, 8, dtype=torch.float16)
    assert "float16" in NF.explain("rms_norm", half, half[0], eps=1e-6)["refused"]["nki"]
    few = NF.explain("expert_affinities", torch.randn(2, 4), top_k=2, rule="topk_softmax")
    assert "E is 4" in few["refused"]["nki"]


def test_compiles_into_a_whole_graph() -> None:
    def block(x: Tensor, weight: Tensor, projection: Tensor) -> Tensor:
        return NF.o_proj(NF.rms_norm(x + 1, weight, eps=1e-6), projection) * 2

    x, weight, projection = torch.randn(5, 24), torch.randn(24), torch.randn(16, 24)
    torch._dynamo.reset()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, weight, projection), block(x, weight, projection))
    with NF.forced({"rms_norm": "torch", "o_proj": "torch"}):
        torch.testing.assert_close(compiled(x, weight, projection), block(x, weight, projection), rtol=1e-4, atol=1e-5)


def test_a_row_that_does_not_fit_is_refused_by_the_core() -> None:
    with pytest.raises(NkiValidationError, match="SBUF"):
        simulate(library.rms_norm)(torch.randn(1, 60_000), torch.randn(60_000), 1e-6, False, False)
