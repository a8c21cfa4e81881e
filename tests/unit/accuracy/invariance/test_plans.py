"""Conditions reach every edge, follow the same streams everywhere, and survive a trip through JSON."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotage.accuracy.invariance import bench, plans
from pilotage.accuracy.invariance.streams import Sizes, make
from pilotage.serving.drive import Schedule

TINY = Sizes(block=16, windows=(16,), token_buckets=(24, 72, 208), seq_buckets=(1, 3, 6), max_len=208)
LARGE = Sizes(block=32, windows=(512,), token_buckets=(64, 256, 1024), seq_buckets=(1, 8), max_len=2048)
PLAIN = Sizes(block=32, windows=(), token_buckets=(64, 256, 1024), seq_buckets=(1, 8), max_len=1024)
SMALL = Sizes(block=16, windows=(4,), token_buckets=(16,), seq_buckets=(2,), max_len=24)
ALL = (TINY, LARGE, PLAIN, SMALL)


def draw(lengths: Sequence[int]) -> list[list[int]]:
    return [[1000 * stream + position for position in range(length)] for stream, length in enumerate(lengths)]


@pytest.mark.parametrize("sizes", ALL)
def test_requests_follow_their_streams_and_fit_the_engine(sizes: Sizes) -> None:
    streams = make(sizes, draw)
    assert len(streams.company) <= sizes.seq_buckets[-1]
    found = [plans.alone(streams), *plans.conditions(sizes, streams)]
    for plan in found:
        assert len(plan.streams) == len(plan.schedule.requests)
        for stream, request in zip(plan.streams, plan.schedule.requests, strict=True):
            assert request.tokens == streams.tokens[stream][: len(request.tokens)]
            assert 1 <= request.prompt < len(request.tokens) <= sizes.max_len
        assert all(0 < budget <= sizes.token_buckets[-1] for budget in plan.schedule.budgets)
        assert Schedule.from_json(json.loads(json.dumps(plan.schedule.to_json()))) == plan.schedule
    assert {plan.relation for plan in found} >= {plans.MATES, plans.ORDER, plans.PADDING, plans.HIT, plans.PREEMPTION}
    names = [(plan.relation, plan.name) for plan in found]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("sizes", [TINY, LARGE])
def test_prompts_stand_at_every_edge(sizes: Sizes) -> None:
    streams = make(sizes, draw)
    assert streams.prompts[0] > max(sizes.windows)
    padding = [plan for plan in plans.conditions(sizes, streams) if plan.relation == plans.PADDING]
    alone = {request.prompt for request in padding[0].schedule.requests}
    edges = {sizes.block, *sizes.windows, *sizes.token_buckets}
    wanted = {edge + step for edge in edges for step in (-1, 0, 1)}
    assert {length for length in wanted if length <= sizes.longest} <= alone
    together = {sum(request.prompt for request in plan.schedule.requests) for plan in padding[1:]}
    full = [size for size in sizes.token_buckets if size <= sum(streams.prompts[:2])]
    assert all({size - 1, size, size + 1} <= together for size in full if size - 1 > streams.prompts[1])


def test_a_large_vocabulary_is_compared_where_streams_turn_to_decode_and_around_edges() -> None:
    streams = make(LARGE, draw)
    everything = bench.positions(streams, LARGE, 320)
    assert everything == list(range(max(len(tokens) for tokens in streams.tokens) - 1))
    some = bench.positions(streams, LARGE, 262_144)
    assert {prompt + step for prompt in streams.prompts for step in (-1, 0, 1)} <= set(some)
    assert len(some) * len(streams) * 262_144 <= 1.1 * bench.MAX_LOGITS
    assert sum(position > LARGE.windows[0] for position in some) >= 4


def starts(budgets: tuple[int, ...], length: int) -> list[int]:
    found, at = [], 0
    for budget in itertools.chain(budgets, itertools.repeat(budgets[-1])):
        found.append(at)
        at += budget
        if at >= length:
            return found
    return found


def test_chunks_start_at_every_offset_of_a_page_and_around_every_edge() -> None:
    cuts = plans.cuts(TINY, plans.MANY)
    at = {start for budgets in cuts for start in starts(budgets, TINY.longest)}
    assert {start % TINY.block for start in at} == set(range(TINY.block))
    (window,) = TINY.windows
    assert {window - 1, window, window + 1, window + TINY.block // 2} <= at
    for bucket in TINY.token_buckets[:-1]:
        assert {bucket - 1, bucket, bucket + 1} <= at
    # Past the window too: chunks whose first query no longer sees the request's first key.
    assert sum(start > 2 * window for start in at) > 8
    few = plans.cuts(LARGE, plans.FEW)
    assert len(few) <= plans.FEW + plans.FEW // 2 and min(starts((few[0][0], 1024), LARGE.longest)[1:]) == 1


def test_the_sibling_shares_whole_pages_and_then_differs_and_only_prefix_hits_have_it() -> None:
    streams = make(TINY, draw)
    shared = [a == b for a, b in zip(streams.tokens[0], streams.tokens[streams.sibling], strict=False)]
    assert all(shared[: 2 * TINY.block + 1]) and not any(shared[2 * TINY.block + 1 :])
    found = plans.conditions(TINY, streams)
    together = [plan for plan in found if streams.sibling in plan.streams and not plan.schedule.forget]
    assert together and {plan.relation for plan in together} == {plans.HIT}


@given(st.lists(st.integers(0, 10**4), min_size=1, max_size=80, unique=True), st.integers(2, 30))
def test_thinning_keeps_the_ends(values: list[int], most: int) -> None:
    values = sorted(values)
    kept = plans.thinned(values, most)
    assert len(kept) <= most or len(kept) == len(values) <= most
    assert (kept[0], kept[-1]) == (values[0], values[-1]) and kept == sorted(kept)


def test_a_large_model_is_asked_for_fewer_drafts_and_for_every_kind() -> None:
    streams = make(LARGE, draw)
    every, some = plans.speculations(streams), plans.speculations(streams, thorough=False)
    assert {plan.name for plan in some} < {plan.name for plan in every} and len(some) <= 7
    assert any(plan.free for plan in some) and any(plan.schedule.preempt for plan in some)
    assert any(plan.inherits for plan in some)
    drafted = [plan for plan in some if any(request.drafts for request in plan.schedule.requests)]
    fallen = {
        (after, n)
        for plan in drafted
        for request in plan.schedule.requests
        for after, drafts in enumerate(request.drafts)
        for n, (draft, due) in enumerate(zip(drafts, request.continuation[after:], strict=False))
        if draft != due
    }
    # Each of the three falls somewhere as the first that does.
    assert {n for _, n in fallen} == {0, 1, 2}
