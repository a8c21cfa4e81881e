"""Fuzzing of KV addressing: random page tables, shared prefixes, preemption, rejected drafts, windows, padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kv_world
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_world import DRAFTS, HEADS, KV_HEADS, SCALE, SIZE, WINDOW, World, play

import pilotage.functional as NF
from pilotage.functional import attention, sdpa
from pilotage.kernels import cpu
from pilotage.serving.batch import StepInputs

WHAT = ("admit", "admit", "step", "step", "step", "full", "draft", "preempt", "finish", "slide")
MOVES = st.lists(st.tuples(st.sampled_from(WHAT), st.integers(0, 99), st.integers(0, 99)), min_size=4, max_size=40)
IMPLEMENTATIONS = ["torch", "sdpa", "native"]


def require(implementation: str) -> None:
    if implementation == "native" and (reason := cpu.unavailable()) is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_paged_worlds(implementation: str) -> None:
    require(implementation)
    steps = 0

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.integers(0, 1000), MOVES, st.sampled_from([1, 3, 4, 16]))
    def check(seed: int, moves: list[tuple[str, int, int]], block: int) -> None:
        nonlocal steps
        world = play(seed, [("admit", 11, 0), ("admit", 5, 1), *moves, ("step", 1, 0)], implementation, block=block)
        steps += sum(request.computed for request in world.running)

    check()
    assert steps > 500, "the worlds hardly computed anything"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_fresh_prefills(implementation: str) -> None:
    """Attention among new tokens only: any packing of requests, against each request by itself."""
    require(implementation)

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(st.lists(st.integers(1, 19), min_size=1, max_size=5), st.integers(0, 9), st.sampled_from([None, 1, 5, 64]))
    def check(lengths: list[int], padding: int, window: int | None) -> None:
        world = World(seed=sum(lengths))
        total = sum(lengths)
        ids = torch.randint(0, 50, (total,), generator=torch.Generator().manual_seed(total))
        at = torch.cat([torch.arange(length) for length in lengths])
        q, k, v = (world.embed[name][ids] + world.place[name][at] for name in "qkv")
        pad = torch.full((padding, 1, SIZE), torch.nan)
        q_pad, k_pad = pad.expand(-1, HEADS, -1), pad.expand(-1, KV_HEADS, -1)
        zeros = torch.zeros(padding, dtype=torch.int32)
        owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist(), total], dtype=torch.int32)
        with torch.no_grad(), NF.forced({"flash_attention": implementation}):
            got = NF.flash_attention(
                torch.cat((q, q_pad)),
                torch.cat((k, k_pad)),
                torch.cat((v, k_pad)),
                token_to_req=torch.cat((owner, zeros)),
                positions=torch.cat((at.int(), zeros)),
                query_start_loc=starts,
                scale=SCALE,
                window=window,
            )
        first = 0
        for length in lengths:
            request = kv_world.Living(tokens=ids[first : first + length].tolist(), pages=[[], []])
            expected = world.oracle(request, 0, length, window)
            torch.testing.assert_close(got[first : first + length], expected, rtol=0, atol=1e-5)
            first += length

    check()


# Faults that the worlds must find: each is planted and played against the same moves as the tests above.


def _wrong_slot_of_second(patch: pytest.MonkeyPatch) -> None:
    real = StepInputs.fill

    def fill(self: StepInputs, forward: Any, **how: Any) -> None:
        real(self, forward, **how)
        for slots in self.slot_mappings:
            second = (self.token_to_req == 1) & (slots >= 0)
            slots[second] = slots[second] // 4 * 4 + (slots[second] + 1) % 4

    patch.setattr(StepInputs, "fill", fill)


def _padding_writes(patch: pytest.MonkeyPatch) -> None:
    real = StepInputs.fill

    def fill(self: StepInputs, forward: Any, **how: Any) -> None:
        real(self, forward, **how)
        for slots in self.slot_mappings:
            slots[slots < 0] = 0

    patch.setattr(StepInputs, "fill", fill)


def _positions_start_at_zero(patch: pytest.MonkeyPatch) -> None:
    """Of a request that enters with cached pages."""
    real = StepInputs.fill

    def fill(self: StepInputs, forward: Any, **how: Any) -> None:
        real(self, forward, **how)
        if self.kind == "prefill":
            starts = self.cached_seq_len[self.token_to_req.long()]
            self.positions -= torch.where(self.positions > 0, starts, 0).int()

    patch.setattr(StepInputs, "fill", fill)


def _stale_table(patch: pytest.MonkeyPatch) -> None:
    """The last page of a request is the one that stood in its row before."""
    real = StepInputs.fill

    def fill(self: StepInputs, forward: Any, **how: Any) -> None:
        kept = [table.clone() for table in self.block_tables]
        real(self, forward, **how)
        for table, old in zip(self.block_tables, kept, strict=True):
            last = (self.seq_lens[0] - 1) // 4
            if old[0, last] > 0:
                table[0, last] = old[0, last]

    patch.setattr(StepInputs, "fill", fill)


def _query_start_off(patch: pytest.MonkeyPatch) -> None:
    """Where the step fills the graph to its last token."""
    real = StepInputs.fill

    def fill(self: StepInputs, forward: Any, **how: Any) -> None:
        real(self, forward, **how)
        if int(self.query_start_loc[-1]) == self.size:
            self.query_start_loc[self.query_start_loc == self.size] -= 1

    patch.setattr(StepInputs, "fill", fill)


def _window_from_the_chunk(patch: pytest.MonkeyPatch) -> None:
    """The window is counted from the chunk's start: inside a chunk nothing is ever too far away."""
    real = sdpa._attend

    def attend(*arguments: Any) -> None:
        *rest, window, softcap, sinks = arguments
        query_at = rest[4]
        real(*rest, None if query_at > 0 and window is not None else window, softcap, sinks)

    patch.setattr(sdpa, "_attend", attend)


def _one_key_short(patch: pytest.MonkeyPatch) -> None:
    """The definition sees one key fewer than it may when the window has moved."""
    real = attention.sees

    def visible(query_at: Any, key_at: Any, window: int | None) -> Any:
        return real(query_at, key_at, window - 1 if window is not None else None)

    patch.setattr(attention, "sees", visible)


PLANTED = [
    (_wrong_slot_of_second, "torch"),
    (_padding_writes, "torch"),
    (_positions_start_at_zero, "torch"),
    (_stale_table, "torch"),
    (_query_start_off, "sdpa"),
    (_window_from_the_chunk, "sdpa"),
    (_one_key_short, "torch"),
]


@pytest.mark.parametrize(("plant", "implementation"), PLANTED, ids=lambda value: getattr(value, "__name__", value))
def test_planted_faults_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = [
        ("admit", 22, 0),
        ("admit", 9, 1),
        ("full", 0, 0),
        ("finish", 0, 0),
        ("admit", 29, 0),
        ("full", 0, 0),
        ("step", 3, 0),
    ]
    moves += [("admit", 17, 3), *[("step", n, 0) for n in range(20)]]
    moves += [("draft", 2, 1), ("preempt", 1, 0), *[("step", n, 0) for n in range(20, 30)], ("slide", 0, 0)]
    moves += [("finish", 0, 0), ("admit", 23, 3), *[("step", n, 0) for n in range(30, 60)]]
    play(7, moves, implementation)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        play(7, moves, implementation)


def test_the_worlds_reach_what_they_are_for() -> None:
    """Shared pages, decode steps of several tokens and rejected ones, freed window pages."""
    world = World(seed=3)
    world.admit(22, None)
    with torch.no_grad():
        world.step([24])
        world.admit(23, 1)
        assert world.running[1].computed == 20 and any(count > 1 for count in world.users.values())
        world.step([1, 3])
        free = len(world.free)
        world.slide()
        assert len(world.free) > free and WINDOW < 22
        before = [request.computed for request in world.running]
        world.draft(DRAFTS, 2)
        assert [request.computed for request in world.running] == [n + 1 for n in before]
        world.step([1, 1])
