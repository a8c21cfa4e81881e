"""Attention and cache writes against a loop over tokens, in double precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import pilotage.functional as NF
from pilotage.core.errors import Unsupported
from pilotage.functional import fused

HEADS, KV_HEADS, SIZE = 6, 2, 20
IMPLEMENTATIONS = ("torch", "sdpa")


def attend_slowly(
    q_NH: Tensor, k_SKH: Tensor, v_SKH: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """One query against the keys it sees."""
    group = q_NH.shape[0] // k_SKH.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k_SKH, v_SKH))
    logits = torch.einsum("nh,snh->ns", q_NH.double(), k) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if sinks is not None:
        logits = torch.cat((logits, sinks.double()[:, None]), dim=1)
    weights = logits.softmax(-1)[:, : k.shape[0]]
    return torch.einsum("ns,snh->nh", weights, v)


@dataclass
class Requests:
    """Requests with some tokens cached and some new, in scattered pages that are NaN where nothing was written."""

    cached: list[int]
    new: list[int]
    block_size: int
    padding: int = 3

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(sum(self.cached) * 31 + sum(self.new))
        lengths = [a + b for a, b in zip(self.cached, self.new, strict=True)]
        columns = max(-(-length // self.block_size) for length in lengths) + 1
        rows = len(lengths) + 1
        pages = torch.randperm(rows * columns, generator=generator) + 1
        self.table = pages.view(rows, columns).to(torch.int32)
        shape = (rows * columns + 1, KV_HEADS, self.block_size, SIZE)
        self.k_cache, self.v_cache = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        self.k = [torch.randn(n, KV_HEADS, SIZE, generator=generator) for n in lengths]
        self.v = [torch.randn(n, KV_HEADS, SIZE, generator=generator) for n in lengths]
        self.q = [torch.randn(n, HEADS, SIZE, generator=generator) for n in lengths]
        for r, cached in enumerate(self.cached):
            if cached:
                slots = self.slots(r, 0, cached)
                NF.write_kv(self.k_cache, self.v_cache, self.k[r][:cached], self.v[r][:cached], slot_mapping=slots)
        self.total = sum(self.new)
        self.slot_mapping = torch.full((self.total + self.padding,), -1)
        self.slot_mapping[: self.total] = torch.cat([self.slots(r, c, n) for r, c, n in self.spans()])
        NF.write_kv(
            self.k_cache, self.v_cache, self.packed(self.k), self.packed(self.v), slot_mapping=self.slot_mapping
        )

    def spans(self) -> list[tuple[int, int, int]]:
        return [(r, c, c + n) for r, (c, n) in enumerate(zip(self.cached, self.new, strict=True))]

    def slots(self, row: int, start: int, end: int) -> Tensor:
        at = torch.arange(start, end)
        return self.table[row][at // self.block_size].long() * self.block_size + at % self.block_size

    def packed(self, parts: list[Tensor]) -> Tensor:
        rows = torch.cat([parts[r][start:end] for r, start, end in self.spans()])
        return torch.cat((rows, torch.full((self.padding, *rows.shape[1:]), torch.nan)))

    def arguments(self, paged: bool) -> dict[str, Any]:
        pad = torch.zeros(self.padding, dtype=torch.int32)
        starts = torch.tensor([0, *torch.tensor([*self.new, 0]).cumsum(0).tolist()], dtype=torch.int32)
        owner = torch.repeat_interleave(torch.arange(len(self.new)), torch.tensor(self.new)).int()
        positions = torch.cat([torch.arange(start, end) for _, start, end in self.spans()]).int()
        common = {
            "token_to_req": torch.cat((owner, pad)),
            "positions": torch.cat((positions, pad)),
            "query_start_loc": starts,
        }
        if not paged:
            return common
        lengths = [end for _, _, end in self.spans()]
        return common | {"block_table": self.table, "seq_lens": torch.tensor([*lengths, 0], dtype=torch.int32)}

    def expected(self, window: int | None, **how: Any) -> Tensor:
        rows = []
        for r, start, end in self.spans():
            for at in range(start, end):
                first = max(0, at - window + 1) if window else 0
                seen = slice(first, at + 1)
                rows.append(attend_slowly(self.q[r][at], self.k[r][seen], self.v[r][seen], **how))
        return torch.stack(rows)


OPTIONS = {
    "plain": {},
    "window": {"window": 3},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0, -2.0])},
    "all": {"window": 5, "softcap": 1.5, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0, -2.0])},
}


def check(requests: Requests, operator: str, implementation: str, options: dict[str, Any], **more: Any) -> None:
    paged = operator != "flash_attention"
    q = requests.packed(requests.q)
    keys = (requests.k_cache, requests.v_cache) if paged else (requests.packed(requests.k), requests.packed(requests.v))
    with torch.no_grad(), NF.forced({operator: implementation}):
        got = getattr(NF, operator)(q, *keys, scale=0.3, **requests.arguments(paged), **options, **more)
    how = {"softcap": None, "sinks": None, "window": None} | options
    expected = requests.expected(scale=0.3, **how)
    torch.testing.assert_close(got[: requests.total].double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
class TestOperators:
    def test_prefill_of_several_requests(self, options: dict[str, Any], implementation: str) -> None:
        check(Requests([0, 0, 0], [11, 1, 7], 4), "flash_attention", implementation, options)

    @pytest.mark.parametrize("segment", [0, 4, 8])
    def test_chunks_with_a_cached_prefix(self, options: dict[str, Any], implementation: str, segment: int) -> None:
        requests = Requests([5, 0, 8, 3], [6, 1, 7, 4], 4)
        check(requests, "segmented_attention", implementation, options, kv_segment_size=segment)

    def test_decode(self, options: dict[str, Any], implementation: str) -> None:
        check(Requests([5, 0, 8, 3], [1, 1, 1, 1], 4), "attention_decode", implementation, options)


def test_a_window_skips_whole_query_steps_correctly() -> None:
    """Long enough for several steps of the windowed loop, with a prefix that is partly outside the window."""
    check(Requests([37, 0], [300, 290], 8), "segmented_attention", "sdpa", {"window": 33}, kv_segment_size=0)


def test_pages_outside_the_window_are_never_read() -> None:
    requests = Requests([40], [2], 4)
    expected = requests.expected(scale=0.3, window=6, softcap=None, sinks=None)
    freed = requests.table[0, : (40 - 6 + 1) // 4].long()
    requests.k_cache[freed], requests.v_cache[freed] = torch.nan, torch.nan
    for implementation in IMPLEMENTATIONS:
        with torch.no_grad(), NF.forced({"attention_decode": implementation}):
            got = NF.attention_decode(
                requests.packed(requests.q),
                requests.k_cache,
                requests.v_cache,
                scale=0.3,
                window=6,
                **requests.arguments(True),
            )
        torch.testing.assert_close(got[:2].double(), expected, rtol=0, atol=2e-6)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_write_changes_its_slots_and_no_other_bit(data: st.DataObject) -> None:
    pages, block_size = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    slots = data.draw(st.lists(st.integers(0, pages * block_size - 1), unique=True, max_size=6))
    padded = data.draw(st.permutations([*slots, *[-1] * data.draw(st.integers(0 if slots else 1, 4))]))
    before = torch.randn(2, pages, KV_HEADS, block_size, SIZE)
    before[0, :, :, 0] = torch.nan
    k_cache, v_cache = before[0].clone(), before[1].clone()
    new = torch.randn(2, len(padded), KV_HEADS, SIZE)
    with NF.forced({"write_kv": "torch"}):
        NF.write_kv(k_cache, v_cache, new[0], new[1], slot_mapping=torch.tensor(padded))
    rows_cache = before[1].clone()
    NF.write_rows(rows_cache, new[1], slot_mapping=torch.tensor(padded))
    for cache, old, rows in ((k_cache, before[0], new[0]), *((c, before[1], new[1]) for c in (v_cache, rows_cache))):
        expected = old.clone()
        for row, slot in enumerate(padded):
            if slot >= 0:
                expected[slot // block_size, :, slot % block_size] = rows[row]
        assert torch.equal(cache.view(torch.int32), expected.view(torch.int32))


def test_decode_rows_of_padding_are_finite_beside_nan_pages() -> None:
    requests = Requests([5, 2], [1, 1], 4)
    q = torch.zeros(5, HEADS, SIZE)
    for implementation in IMPLEMENTATIONS:
        with torch.no_grad(), NF.forced({"attention_decode": implementation}):
            got = NF.attention_decode(q, requests.k_cache, requests.v_cache, scale=0.3, **requests.arguments(True))
        assert torch.isfinite(got).all()


def test_the_definition_has_the_gradient_of_dense_attention() -> None:
    requests = Requests([0], [9], 4, padding=0)
    leaves = [x[0].clone().requires_grad_() for x in (requests.q, requests.k, requests.v)]
    out = NF.flash_attention(*leaves, scale=0.3, window=4, **requests.arguments(False))
    out.square().sum().backward()
    q, k, v = (x.detach().clone().requires_grad_() for x in leaves)
    at = torch.arange(9)
    mask = (at[None, :] <= at[:, None]) & (at[None, :] > at[:, None] - 4)
    keys, values = (x.transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, dim=0) for x in (k, v))
    dense = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=mask, scale=0.3)
    dense.square().sum().backward()
    torch.testing.assert_close(out, dense.transpose(0, 1))
    for ours, theirs in zip(leaves, (q, k, v), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("options", [{}, {"window": 3}], ids=["plain", "window"])
@pytest.mark.parametrize("operator", ["flash_attention", "segmented_attention", "attention_decode"])
def test_what_a_gpu_would_run_gives_the_same_on_the_cpu(operator: str, options: dict[str, Any]) -> None:
    """Called directly: its domain is another device."""
    prefill = {"flash_attention": ([0, 0, 0], [11, 1, 7]), "segmented_attention": ([5, 0, 8, 3], [6, 1, 7, 4])}
    requests = Requests(*prefill.get(operator, ([5, 0, 8, 3], [1, 1, 1, 1])), 4)
    paged = operator != "flash_attention"
    keys = (requests.k_cache, requests.v_cache) if paged else (requests.packed(requests.k), requests.packed(requests.v))
    more = {"kv_segment_size": 0} if operator == "segmented_attention" else {}
    function = getattr(fused, operator)
    got = function(requests.packed(requests.q), *keys, scale=0.3, **requests.arguments(paged), **options, **more)
    expected = requests.expected(scale=0.3, **({"softcap": None, "sinks": None, "window": None} | options))
    torch.testing.assert_close(got[: requests.total].double(), expected, rtol=0, atol=2e-6)
    with pytest.raises(Unsupported, match="q is on cpu, not cuda"), NF.forced({operator: "fused"}):
        getattr(NF, operator)(requests.packed(requests.q), *keys, scale=0.3, **requests.arguments(paged), **more)
