"""Addressing: every token at its position, in its request, in the slot that its block table says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotage.serving.batch import LayerGroup, Scheduled, StepInputs, split

STEP = st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=12)


@given(STEP, st.integers(1, 5))
def test_split_runs_every_request_once_and_decodes_first(step: list[tuple[int, bool]], seqs: int) -> None:
    items = [Scheduled(row=row, num_tokens=count, fresh=fresh) for row, (count, fresh) in enumerate(step)]
    forwards = split(items, max_tokens=64, max_prefill_seqs=seqs)
    ran = {row: count for forward in forwards for row, count in zip(forward.rows, forward.num_tokens, strict=True)}
    assert ran == {item.row: item.num_tokens for item in items}
    assert sum(len(forward.rows) for forward in forwards) == len(items)
    assert all(forward.kind == "prefill" for forward in forwards[1:])
    for forward in forwards:
        if forward.kind == "decode":
            assert set(forward.num_tokens) == {1}
            assert not any(items[row].fresh for row in forward.rows)
        else:
            assert len(forward.rows) <= seqs
            assert sum(forward.num_tokens) <= 64


def test_prefills_keep_the_order_of_the_scheduler() -> None:
    # Row 0 (scheduled last) may rest on pages that row 2 (scheduled first) writes in this step.
    step = [Scheduled(row=2, num_tokens=33, fresh=True), Scheduled(row=0, num_tokens=1, fresh=True)]
    forwards = split(step, max_tokens=64, max_prefill_seqs=1)
    assert [forward.rows for forward in forwards] == [(2,), (0,)]
    assert all(forward.kind == "prefill" for forward in forwards)


@settings(max_examples=60)
@given(st.data())
def test_fill_addresses_every_token(data: st.DataObject) -> None:
    block_size, blocks = 4, 8
    groups = [
        LayerGroup(layer_names=("a", "b"), block_size=block_size, max_blocks_per_seq=blocks),
        LayerGroup(layer_names=("c",), block_size=block_size, max_blocks_per_seq=blocks),
    ]
    n = data.draw(st.integers(1, 4))
    computed = np.array([data.draw(st.integers(0, 20)) for _ in range(n)], dtype=np.int32)
    counts = [data.draw(st.integers(1, min(16, 32 - int(done)))) for done in computed]
    step = [Scheduled(row=row, num_tokens=count, fresh=True) for row, count in enumerate(counts)]
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    token_ids = rng.integers(1, 300, (n, 32), dtype=np.int32)
    # Pages from one pool, as vLLM hands them out: no page twice, page 0 owned by nobody.
    pages = rng.permutation(np.arange(1, 1 + 2 * n * blocks, dtype=np.int32)).reshape(2, n, blocks)
    (forward,) = split(step, max_tokens=64, max_prefill_seqs=4)
    inputs = StepInputs("prefill", 64, num_rows=4, groups=groups)
    inputs.fill(forward, token_ids=token_ids, num_computed=computed, block_tables=[pages[0], pages[1]])

    total = sum(counts)
    flat = [(row, computed[row] + offset) for row in range(n) for offset in range(counts[row])]
    assert inputs.input_ids[:total].tolist() == [token_ids[row, position] for row, position in flat]
    assert inputs.positions[:total].tolist() == [position for _, position in flat]
    assert inputs.token_to_req[:total].tolist() == [row for row, _ in flat]
    for group, layer in ((0, "a"), (1, "c")):
        metadata = inputs.attn_metadata[layer]
        assert metadata["slot_mapping"][:total].tolist() == [
            int(pages[group, row, position // block_size]) * block_size + position % block_size
            for row, position in flat
        ]
        assert len(set(metadata["slot_mapping"][:total].tolist())) == total
        assert (metadata["slot_mapping"][total:] == -1).all()
    assert inputs.attn_metadata["a"] is inputs.attn_metadata["b"]
    ends = np.cumsum(counts)
    assert inputs.query_start_loc.tolist() == [0, *ends, *[total] * (4 - n)]
    assert inputs.seq_lens.tolist() == [*(computed + counts), *[0] * (4 - n)]
    assert inputs.cached_seq_len.tolist() == [*computed, *[0] * (4 - n)]
    assert inputs.sampling_positions[:n].tolist() == list(ends - 1)


def test_a_smaller_batch_leaves_nothing_of_the_larger_one_before() -> None:
    group = LayerGroup(layer_names=("a",), block_size=4, max_blocks_per_seq=2)
    inputs = StepInputs("decode", 4, num_rows=4, groups=[group])
    token_ids = np.arange(32, dtype=np.int32).reshape(4, 8)
    tables = [np.arange(1, 9, dtype=np.int32).reshape(4, 2)]
    computed = np.array([3, 4, 5, 6], dtype=np.int32)
    for rows in ((0, 1, 2, 3), (2,)):
        (forward,) = split(
            [Scheduled(row=row, num_tokens=1, fresh=False) for row in rows], max_tokens=64, max_prefill_seqs=4
        )
        inputs.fill(forward, token_ids=token_ids, num_computed=computed, block_tables=tables)
    assert inputs.input_ids.tolist() == [21, 0, 0, 0]
    assert inputs.seq_lens.tolist() == [6, 0, 0, 0]
    assert inputs.attn_metadata["a"]["slot_mapping"].tolist() == [6 * 4 + 1, -1, -1, -1]
    assert inputs.attn_metadata["a"]["block_table_tensor"].tolist() == [[5, 6], [0, 0], [0, 0], [0, 0]]
    assert inputs.query_start_loc.tolist() == [0, 1, 1, 1, 1]


def test_rows_that_are_read_are_listed() -> None:
    group = LayerGroup(layer_names=("a",), block_size=4, max_blocks_per_seq=2)
    inputs = StepInputs("prefill", 8, num_rows=3, groups=[group])
    rows = inputs.attn_metadata["wanted_rows"]
    (forward,) = split(
        [Scheduled(row=0, num_tokens=2, fresh=True), Scheduled(row=1, num_tokens=3, fresh=True)],
        max_tokens=64,
        max_prefill_seqs=3,
    )
    step = {
        "token_ids": np.zeros((3, 8), dtype=np.int32),
        "num_computed": np.zeros(3, dtype=np.int32),
        "block_tables": [np.ones((3, 2), dtype=np.int32)],
    }
    inputs.fill(forward, **step)
    assert rows.tolist() == [5, 0, 1, 2, 3, 4, 0, 0, 0]
    inputs.want_sampled()
    assert rows[:3].tolist() == [2, 1, 4]
    inputs.fill(forward, **step)
    assert rows.tolist() == [5, 0, 1, 2, 3, 4, 0, 0, 0], "a step says it anew"
    assert "wanted_rows" not in StepInputs("decode", 4, num_rows=4, groups=[group]).attn_metadata


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_metadata_has_the_documented_keys(kind: str) -> None:
    group = LayerGroup(layer_names=("layers.0.self_attn",), block_size=4, max_blocks_per_seq=2)
    metadata = StepInputs(kind, 4, num_rows=4, groups=[group]).attn_metadata  # type: ignore[arg-type]
    layer = metadata["layers.0.self_attn"]
    documented = {
        "block_table_tensor",
        "slot_mapping",
        "max_query_len",
        "block_size",
        "max_blocks_per_seq",
        "decode_token_threshold",
        "cached_seq_len",
        "kv_segment_size",
    }
    assert documented <= layer.keys()
    assert metadata["decode_token_threshold"] == 1
    assert (layer["max_query_len"] <= layer["decode_token_threshold"]) == (kind == "decode")
