"""Rows hold every token once; targets and positions respect documents."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotage.training.engine import IGNORED
from pilotage.training.packing import Rows, Tokens, rows_of_step


def documents(*lengths: int, learned: list[int] | None = None) -> Tokens:
    total = sum(lengths)
    starts = np.cumsum([0, *lengths[:-1]])
    flags = np.ones(total, bool)
    for index in learned or []:
        flags[index] = False
    return Tokens(np.arange(10, 10 + total, dtype=np.int32), flags, starts.astype(np.int64))


def naive(tokens: Tokens, length: int) -> list[tuple[list[int], list[int], list[int]]]:
    """Token by token, as slowly and plainly as can be."""
    owner = np.searchsorted(tokens.starts, np.arange(len(tokens.ids)), side="right")
    found = []
    for start in range(0, len(tokens.ids), length):
        ids, labels, positions = [], [], []
        for at in range(start, start + length):
            if at >= len(tokens.ids):
                ids.append(0)
                labels.append(IGNORED)
                positions.append(0 if at == max(len(tokens.ids), start) else positions[-1] + 1)
                continue
            ids.append(int(tokens.ids[at]))
            fresh = at == start or owner[at] != owner[at - 1]
            positions.append(0 if fresh else positions[-1] + 1)
            has_next = at + 1 < len(tokens.ids) and owner[at + 1] == owner[at] and tokens.learned[at + 1]
            labels.append(int(tokens.ids[at + 1]) if has_next else IGNORED)
        found.append((ids, labels, positions))
    return found


@given(st.lists(st.integers(1, 17), min_size=1, max_size=12), st.integers(1, 12), st.data())
def test_rows_are_what_token_by_token_packing_gives(lengths: list[int], length: int, data: st.DataObject) -> None:
    given_tokens = data.draw(st.lists(st.integers(0, sum(lengths) - 1), max_size=5))
    tokens = documents(*lengths, learned=given_tokens)
    rows = Rows(tokens, length, padding=0)
    assert [tuple(part.tolist() for part in rows.row(i)) for i in range(len(rows))] == naive(tokens, length)


def test_an_index_past_the_end_is_a_row_without_targets() -> None:
    batch = Rows(documents(5), 4, padding=0).batch([1, 2])
    assert batch.num_targets() == 0
    assert batch.input_ids.shape == (2, 4)


@given(st.integers(1, 9), st.integers(1, 23), st.integers(0, 5))
def test_each_epoch_takes_every_row_once(rows: int, count: int, seed: int) -> None:
    steps = 3 * count
    taken = [index for step in range(steps) for index in rows_of_step(step, rows=rows, count=count, seed=seed)]
    for epoch in range(len(taken) // count):
        assert sorted(taken[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_epochs_differ_in_order_and_seeds_too() -> None:
    first, second = (rows_of_step(step, rows=50, count=50, seed=0) for step in (0, 1))
    assert first != second
    assert first != rows_of_step(0, rows=50, count=50, seed=1)


@pytest.mark.parametrize("length", [3, 64])
def test_positions_of_a_row_start_at_zero(length: int) -> None:
    rows = Rows(documents(50), length, padding=0)
    assert all(rows.row(i)[2][0] == 0 for i in range(len(rows)))
