"""The compiled CPU operators against their definitions: odd shapes, every option, pages that must not be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import twins
from torch import Tensor

import pilotage.functional as NF
from pilotage.kernels import cpu
from pilotage.models.common.paging import PagedSession

pytestmark = pytest.mark.skipif(cpu.unavailable() is not None, reason=f"no compiled kernels: {cpu.unavailable()}")

# The definition rounds once from fp32 as well; what differs is the order of fp32 sums and one rounding of the result.
TOLERANCE = {torch.float32: {"rtol": 2e-5, "atol": 2e-5}, torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2}}
DTYPES = (torch.float32, torch.bfloat16)


def compare(operator: str, *args: Any, dtype: torch.dtype, **kwargs: Any) -> None:
    function = getattr(NF, operator)
    with torch.no_grad():
        with NF.forced({operator: "torch"}):
            expected = function(*args, **kwargs)
        with NF.forced({operator: "native"}):
            got = function(*args, **kwargs)
    torch.testing.assert_close(got, expected, **TOLERANCE[dtype])


@dataclass
class Batch:
    """Requests of some lengths, each with its last `new` tokens in this step, cached in scattered pages."""

    lengths: list[int]
    new: list[int]
    heads: int
    kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    padding: int = 3

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(len(self.lengths) * 1000 + self.head_size)
        tokens = sum(self.new) + self.padding
        pages_each = [-(-length // self.block_size) for length in self.lengths]
        self.columns = max(pages_each) + 2
        num_pages = sum(pages_each) + 3
        order = torch.randperm(num_pages, generator=generator).tolist()
        # Whatever belongs to nobody is NaN: reading it shows.
        shape = (num_pages, self.kv_heads, self.block_size, self.head_size)
        self.k_cache = torch.full(shape, float("nan"), dtype=self.dtype)
        self.v_cache = torch.full(shape, float("nan"), dtype=self.dtype)
        self.block_table = torch.full((len(self.lengths) + 1, self.columns), order[-1], dtype=torch.int32)
        self.q = torch.randn(tokens, self.heads, self.head_size, generator=generator).to(self.dtype)
        self.k = torch.randn(tokens, self.kv_heads, self.head_size, generator=generator).to(self.dtype)
        self.v = torch.randn(tokens, self.kv_heads, self.head_size, generator=generator).to(self.dtype)
        positions, owner, start = [], [], [0]
        for row, (length, new) in enumerate(zip(self.lengths, self.new, strict=True)):
            for page in range(pages_each[row]):
                self.block_table[row, page] = order.pop(0)
            for at in range(length):
                page, slot = self.block_table[row, at // self.block_size], at % self.block_size
                for cache in (self.k_cache, self.v_cache):
                    values = torch.randn(self.kv_heads, self.head_size, generator=generator)
                    cache[page, :, slot] = values.to(self.dtype)
            positions += range(length - new, length)
            owner += [row] * new
            start.append(start[-1] + new)
        start.append(start[-1])  # a padded row
        self.positions = torch.tensor(positions + [0] * self.padding, dtype=torch.int32)
        self.token_to_req = torch.tensor(owner + [-1] * self.padding, dtype=torch.int32)
        self.query_start_loc = torch.tensor(start, dtype=torch.int32)
        self.seq_lens = torch.tensor([*self.lengths, 0], dtype=torch.int32)

    @property
    def rows(self) -> dict[str, Tensor]:
        return {
            "token_to_req": self.token_to_req,
            "positions": self.positions,
            "query_start_loc": self.query_start_loc,
        }

    def paged(self, operator: str, **options: Any) -> None:
        if operator == "segmented_attention":
            options["kv_segment_size"] = 0
        real = int(self.query_start_loc[-1])
        args = (self.q, self.k_cache, self.v_cache)
        kwargs = {**self.rows, "block_table": self.block_table, "seq_lens": self.seq_lens, **options}
        results = []
        for name in ("torch", "native"):
            with torch.no_grad(), NF.forced({operator: name}):
                results.append(getattr(NF, operator)(*args, **kwargs))
        assert torch.isfinite(results[1]).all()
        torch.testing.assert_close(results[1][:real], results[0][:real], **TOLERANCE[self.dtype])

    def packed(self, **options: Any) -> None:
        real = int(self.query_start_loc[-1])
        results = []
        for name in ("torch", "native"):
            with torch.no_grad(), NF.forced({"flash_attention": name}):
                results.append(NF.flash_attention(self.q, self.k, self.v, **self.rows, **options))
        torch.testing.assert_close(results[1][:real], results[0][:real], **TOLERANCE[self.dtype])


SHAPES = [  # heads, KV heads, head size, slots a page
    (6, 2, 20, 16),
    (4, 1, 256, 32),
    (4, 4, 64, 16),
    (16, 2, 33, 8),
    (32, 1, 48, 32),
    (7, 1, 80, 16),
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 16},
    {"window": 1},
    {"window": 100, "softcap": 3.0},
    {"sinks": True},
    {"window": 40, "softcap": 5.0, "sinks": True},
]


def options_for(options: dict[str, Any], heads: int) -> dict[str, Any]:
    options = {"scale": 0.21, **options}
    if options.get("sinks"):
        options["sinks"] = torch.linspace(-2, 3, heads)
    return options


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode(shape: tuple[int, int, int, int], options: dict[str, Any], dtype: torch.dtype) -> None:
    batch = Batch([1, 16, 63, 130, 17], [1, 1, 1, 1, 1], *shape, dtype)
    batch.paged("attention_decode", **options_for(options, shape[0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 600])
def test_decode_splits_long_requests(window: int | None, dtype: torch.dtype) -> None:
    batch = Batch([1100, 5, 512, 513], [1, 1, 1, 3], 4, 2, 40, 32, dtype)
    batch.paged("attention_decode", scale=0.3, window=window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks(shape: tuple[int, int, int, int], options: dict[str, Any], dtype: torch.dtype) -> None:
    batch = Batch([70, 16, 129, 40], [70, 1, 65, 13], *shape, dtype)
    batch.paged("segmented_attention", **options_for(options, shape[0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fresh_prompts(shape: tuple[int, int, int, int], options: dict[str, Any], dtype: torch.dtype) -> None:
    lengths = [70, 1, 129, 40]
    Batch(lengths, lengths, *shape, dtype).packed(**options_for(options, shape[0]))


def test_strided_queries_and_values() -> None:
    """Inputs that are parts of one projection, as qkv_proj hands them over."""
    batch = Batch([50], [50], 4, 2, 24, 16, torch.float32, padding=0)
    whole = torch.randn(50, 8 * 24)
    q, k, v = (part.view(50, -1, 24) for part in whole.split([4 * 24, 2 * 24, 2 * 24], dim=-1))
    batch.q, batch.k, batch.v = q, k, v
    batch.packed(scale=0.2)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(64, 32), (1, 1), (130, 63), (257, 640), (48, 100), (37, 2100), (70, 4096)]
)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 15, 16, 31, 33, 70, 96, 97, 130])
def test_linear(rows: int, outputs: int, inputs: int, bias: bool) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inputs).bfloat16(), torch.randn(outputs, inputs).bfloat16()
    b = torch.randn(outputs).bfloat16() if bias else None
    with torch.no_grad(), NF.forced({"linear": "native"}):
        got = NF.linear(x, weight, b)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
    # fp32 sums, one rounding to bf16: half an ulp, and a little for the sums.
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-4 * inputs**0.5)


@pytest.mark.parametrize("inputs", [640, 2050, 4200])
def test_linear_of_long_rows_is_summed_in_parts(inputs: int) -> None:
    torch.manual_seed(inputs)
    x, weight = torch.randn(107, inputs).bfloat16(), torch.randn(70, inputs).bfloat16()
    with torch.no_grad(), NF.forced({"linear": "native"}):
        got = NF.linear(x, weight)
    torch.testing.assert_close(got.double(), x.double() @ weight.double().T, rtol=2**-8, atol=1e-4 * inputs**0.5)


# 1,024 and 4,096 columns: rows that lie a multiple of the cache's period apart; more than 2,048 are taken in runs.
@pytest.mark.parametrize("inputs", [640, 1024, 2050, 4096, 4500])
@pytest.mark.parametrize("outputs", [96, 35])
@pytest.mark.parametrize("several", [(96, 1, 2, 3, 5, 9, 17, 31, 64, 95), (200, 97, 128, 199)])
def test_linear_row_does_not_depend_on_the_batch(several: tuple[int, ...], outputs: int, inputs: int) -> None:
    torch.manual_seed(inputs)
    x, weight = torch.randn(several[0], inputs).bfloat16(), torch.randn(outputs, inputs).bfloat16()
    with torch.no_grad(), NF.forced({"linear": "native"}):
        whole = NF.linear(x, weight)
        for rows in several[1:]:
            assert torch.equal(NF.linear(x[:rows], weight), whole[:rows])


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "width", "hidden"), [(1, 96, 80), (8, 33, 130), (32, 64, 64), (50, 96, 200), (120, 96, 200)]
)
def test_mlp(rows: int, width: int, hidden: int, bias: bool, activation: str) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, width).bfloat16() * 3
    gate_up, down = torch.randn(2 * hidden, width).bfloat16() * 0.2, torch.randn(width, hidden).bfloat16() * 0.1
    biases = [torch.randn(2 * hidden).bfloat16(), torch.randn(width).bfloat16()] if bias else [None, None]
    # Sums in another order move a few of the rounded activations by an ulp, and with them the second product.
    with torch.no_grad():
        results = []
        for name in ("torch", "native"):
            with NF.forced({"mlp": name}):
                results.append(NF.mlp(x, gate_up, down, *biases, activation=activation))
    torch.testing.assert_close(results[1], results[0], rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("real", [0, 1, 5, 40])
def test_rows_of_padding_are_left_out(real: int) -> None:
    torch.manual_seed(real)
    x = torch.randn(40, 64).bfloat16()
    gate_up, down = torch.randn(160, 64).bfloat16() * 0.1, torch.randn(64, 80).bfloat16() * 0.1
    ends = torch.tensor([0, min(1, real), real], dtype=torch.int32)
    x[real:] = float("nan")  # whatever is there: neither read nor in the result
    with torch.no_grad(), NF.forced({"linear": "native", "mlp": "native"}), NF.padded(40, ends):
        results = [NF.linear(x, gate_up), NF.mlp(x, gate_up, down, activation="silu")]
        assert NF.linear(torch.ones(7, 64).bfloat16(), gate_up).all(-1).any()  # another number of rows: none is padding
    with torch.no_grad():
        expected = [NF.linear(x[:real], gate_up), NF.mlp(x[:real], gate_up, down, activation="silu")]
    for got, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(got[:real], wanted, rtol=1e-2, atol=1e-2)
        assert not got[real:].any()


@pytest.mark.parametrize("listed", [[], [4], [3, 39, 0], list(range(40))])
def test_only_wanted_rows_are_computed(listed: list[int]) -> None:
    torch.manual_seed(len(listed))
    x = torch.randn(40, 64).bfloat16()
    gate_up, down = torch.randn(160, 64).bfloat16() * 0.1, torch.randn(64, 80).bfloat16() * 0.1
    rows = torch.tensor([len(listed), *listed, *[99] * (40 - len(listed))], dtype=torch.int32)
    with torch.no_grad(), NF.forced({"linear": "native", "o_proj": "native", "mlp": "native"}), NF.padded(40, None):
        whole = [NF.o_proj(x, gate_up), NF.mlp(x, gate_up, down, activation="silu")]
        with NF.only_wanted(rows):
            results = [NF.o_proj(x, gate_up), NF.mlp(x, gate_up, down, activation="silu")]
            assert torch.equal(NF.linear(x, gate_up), whole[0])  # keys and values of every row are read later
    left_out = [row for row in range(40) if row not in listed]
    for got, expected in zip(results, whole, strict=True):
        torch.testing.assert_close(got[listed], expected[listed], rtol=1e-2, atol=1e-2)
        assert not got[left_out].any()


def test_a_row_that_does_not_exist_cannot_be_wanted() -> None:
    x, weight = torch.randn(4, 32).bfloat16(), torch.randn(8, 32).bfloat16()
    rows = torch.tensor([2, 0, 4, 0, 0], dtype=torch.int32)
    forced, listed = NF.forced({"o_proj": "native"}), NF.only_wanted(rows)
    with torch.no_grad(), forced, NF.padded(4, None), listed, pytest.raises(RuntimeError, match="no row 4"):
        NF.o_proj(x, weight)


@pytest.mark.parametrize("name", ["gemma3", "llama3"])
def test_a_models_last_layer_leaves_out_what_nobody_reads(tiny: Callable[..., Path], name: str) -> None:
    """The rows that are read come out as before, and so do the keys and values of all."""
    model = twins.our_model(tiny(name), torch.bfloat16)
    streams = twins.prompts((23, 40))
    ends = [22, 62]

    def narrowed(input_ids: Tensor, positions: Tensor, context: Any, sampled: Tensor) -> Tensor:
        if len(input_ids) == 80:  # not the decode step
            context["wanted_rows"] = torch.tensor([2, *ends, *[0] * 78], dtype=torch.int32)
        logits: Tensor = model(input_ids, positions, context, sampled)
        return logits

    found = []
    for call in (None, narrowed):
        session = PagedSession(model=model, num_requests=2, max_tokens=48, poison=False, call=call)
        first = session.step(dict(enumerate(streams)), bucket=80)
        second = session.step({0: [5], 1: [6]}, bucket=2, decode=True)
        found.append((first, second, session.pages))
    (whole, later, pages), (part, later_too, pages_too) = found
    for request in (0, 1):
        torch.testing.assert_close(part[request][-1], whole[request][-1], rtol=2e-2, atol=5e-2)
        assert not torch.allclose(part[request][3], whole[request][3], rtol=2e-2, atol=5e-2), "nothing was left out"
        assert torch.equal(later_too[request], later[request])
    for layer, caches in pages.items():
        for cache, other in zip(caches, pages_too[layer], strict=True):
            assert torch.equal(cache, other)


@pytest.mark.parametrize("rows", [9, 64, 100, 300, 700])
def test_many_rows_and_narrow_weights(rows: int) -> None:
    """Rows in several parts, blocks that are fetched ahead, k in several panels."""
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 2100).bfloat16(), torch.randn(330, 2100).bfloat16()
    with torch.no_grad(), NF.forced({"linear": "native"}):
        got = NF.linear(x, weight)
    torch.testing.assert_close(got.double(), x.double() @ weight.double().T, rtol=2**-8, atol=5e-3)


def test_memory_of_a_large_result_is_used_again_and_never_while_it_is_held() -> None:
    x, weight = torch.ones(40, 32).bfloat16(), torch.ones(40_000, 32).bfloat16()
    with torch.no_grad(), NF.forced({"linear": "native"}):
        held = NF.linear(x, weight)  # 3 MB
        other = NF.linear(2 * x, weight)
        assert held.data_ptr() != other.data_ptr()
        assert (held == 32).all() and (other == 64).all()
        address = other.data_ptr()
        part = other[3]
        del other
        third = NF.linear(3 * x, weight)
        assert third.data_ptr() != address and (part == 64).all()  # a view holds it too
        del part
        assert NF.linear(4 * x, weight).data_ptr() == address


def test_activations_at_the_ends() -> None:
    """Saturated gates, and NaN stays NaN."""
    ends = torch.tensor([-300.0, -90.0, -20.0, -3.0, -1e-3, 0.0, 1e-3, 3.0, 20.0, 300.0, float("nan")]).bfloat16()
    gate = torch.diag(ends)  # one gate a row of the identity
    x = torch.eye(len(ends)).bfloat16()
    gate_up = torch.cat((gate.nan_to_num(7.0), torch.ones_like(gate)))
    down = torch.eye(len(ends)).bfloat16()
    for activation in ("silu", "gelu", "gelu_pytorch_tanh", "relu"):
        compare("mlp", x, gate_up, down, activation=activation, dtype=torch.bfloat16)
        bad = gate_up.clone()
        bad[4, 2] = float("nan")
        with torch.no_grad(), NF.forced({"mlp": "native"}):
            assert NF.mlp(x, bad, down, activation=activation)[2].isnan().any()


def test_mlp_and_qkv() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 96).bfloat16()
    gate_up, down = torch.randn(2 * 80, 96).bfloat16() * 0.1, torch.randn(96, 80).bfloat16() * 0.1
    compare("mlp", x, gate_up, down, activation="gelu_pytorch_tanh", dtype=torch.bfloat16)
    with torch.no_grad(), NF.forced({"qkv_proj": "native"}):
        q, k, v = NF.qkv_proj(x, gate_up, sizes=(96, 32, 32))
    assert [part.shape[-1] for part in (q, k, v)] == [96, 32, 32]
    torch.testing.assert_close(torch.cat((q, k, v), -1), x @ gate_up.T, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 5, 16, 17, 1000])
def test_greedy_tokens(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    logits = torch.randn(7, size).to(dtype)
    logits[1] = float("-inf")
    logits[2, size // 2] = float("nan")
    logits[3] = 1.0  # all tie
    logits[4] = -0.0
    logits[4, -1] = 0.0
    logits[5] = logits[5].round()
    with NF.forced({"greedy_tokens": "native"}):
        assert torch.equal(NF.greedy_tokens(logits), logits.argmax(-1))
        assert torch.equal(NF.greedy_tokens(logits[:, : size // 2 + 1]), logits[:, : size // 2 + 1].argmax(-1))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("all_padding", [False, True])
def test_write_kv(dtype: torch.dtype, all_padding: bool) -> None:
    torch.manual_seed(1)
    caches = [torch.randn(5, 3, 4, 10).to(dtype) for _ in range(2)]
    whole = torch.randn(6, 3 * 10 * 2).to(dtype)
    k, v = (part.view(6, 3, 10) for part in whole.split(30, dim=-1))
    slots = torch.tensor([-1] * 6 if all_padding else [7, -1, 0, 19, 4, -1])
    results = []
    for name in ("torch", "native"):
        mine = [cache.clone() for cache in caches]
        with torch.no_grad(), NF.forced({"write_kv": name}):
            NF.write_kv(*mine, k, v, slot_mapping=slots)
        results.append(mine)
    for expected, got in zip(*results, strict=True):
        assert torch.equal(expected, got)


def test_compiled_without_breaks_and_in_place() -> None:
    """One graph, the same numbers, and the cache is written where it lies."""
    batch = Batch([33, 7], [1, 1], 4, 2, 32, 16, torch.bfloat16, padding=0)
    slots = torch.tensor([20, 40])
    weight = torch.randn(64, 128).bfloat16()

    def step(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        NF.write_kv(k_cache, v_cache, k, v, slot_mapping=slots)
        out = NF.attention_decode(
            q, k_cache, v_cache, **batch.rows, block_table=batch.block_table, seq_lens=batch.seq_lens, scale=0.2
        )
        return NF.o_proj(out.flatten(1), weight)

    NF.reset_receipt()
    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    results = []
    with torch.no_grad():
        for function in (step, compiled):
            caches = [batch.k_cache.clone(), batch.v_cache.clone()]
            addresses = [cache.data_ptr() for cache in caches]
            results.append((function(batch.q, batch.k, batch.v, *caches), *caches))
            assert [cache.data_ptr() for cache in caches] == addresses
    for eager, fast in zip(*results, strict=True):
        assert torch.equal(torch.nan_to_num(eager), torch.nan_to_num(fast))
    ran = {name: entries[0]["implementation"] for name, entries in NF.receipt().items()}
    assert ran == {"write_kv": "native", "attention_decode": "native", "o_proj": "native"}


def test_one_thread_and_two_agree_to_the_bit() -> None:
    batch = Batch([700, 90], [1, 90], 4, 1, 64, 16, torch.bfloat16)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with torch.no_grad(), NF.forced({"segmented_attention": "native"}):
                results.append(
                    NF.segmented_attention(
                        batch.q,
                        batch.k_cache,
                        batch.v_cache,
                        **batch.rows,
                        block_table=batch.block_table,
                        seq_lens=batch.seq_lens,
                        scale=0.2,
                        kv_segment_size=0,
                    )
                )
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_refusals_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(17, 32).bfloat16(), torch.randn(8, 32).bfloat16()
    assert NF.explain("linear", x[:16], weight)["implementation"] == "native"
    enough = cpu.has_bf16_products()
    assert NF.explain("linear", x, weight)["implementation"] == ("native" if enough else "torch")
    assert "float32" in NF.explain("linear", x[:1].float(), weight.float())["refused"]["native"]
    assert "gradient" in NF.explain("linear", x[:1], weight.clone().requires_grad_())["refused"]["native"]
    monkeypatch.setenv("PILOTAGE_DISABLE_KERNELS", "1")
    off = NF.explain("linear", x[:16], weight)
    assert off["implementation"] == "torch" and "switched off" in off["refused"]["native"]
