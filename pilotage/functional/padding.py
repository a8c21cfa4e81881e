"""Rows that nobody looks at: a graph has a fixed number of token rows, and a step rarely fills it.

Inside `padded` an implementation may leave out the rows of a bucket after its last token. Inside `only_wanted` the
output projection and the MLP may leave out more: of a prompt, a model's last layer makes nothing that is read later but
the row that is sampled from. Inside `likely_only` the head may leave out logits that cannot be the largest of their
row. The definitions compute everything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor


class _State:
    num_rows = 0
    ends: Tensor | None = None
    wanted: Tensor | None = None
    likely: Tensor | None = None


@contextlib.contextmanager
def padded(num_rows: int, ends: Tensor | None) -> Iterator[None]:
    """Say where padding starts, for tensors [num_rows, ...] inside the block.

    Args:
        num_rows: T of the graph.
        ends: int32, its last entry is the row where padding starts (`query_start_loc`); None for no padding.
    """
    before = _State.num_rows, _State.ends
    _State.num_rows, _State.ends = num_rows, ends
    try:
        yield
    finally:
        _State.num_rows, _State.ends = before


def ends_of(x: Tensor) -> Tensor | None:
    """Return the tensor whose last entry says how many rows of x [rows, ...] are real; None for all."""
    return _State.ends if x.ndim == 2 and x.shape[0] == _State.num_rows else None


@contextlib.contextmanager
def only_wanted(rows: Tensor | None) -> Iterator[None]:
    """Say which rows of attention's and the MLP's output are read, inside `padded`.

    Args:
        rows: [num_rows + 1] int32, their count and then their numbers; None for all.
    """
    before, _State.wanted = _State.wanted, rows
    try:
        yield
    finally:
        _State.wanted = before


def wanted_of(x: Tensor) -> Tensor | None:
    """Return the tensor that lists the wanted rows of x [rows, ...]; None for all."""
    return _State.wanted if x.ndim == 2 and x.shape[0] == _State.num_rows else None


@contextlib.contextmanager
def likely_only(only: Tensor | None) -> Iterator[None]:
    """Say whether more is read of the head's output than which logit of a row is the largest, the first of those.

    Args:
        only: [1] int32, not zero where nothing else is: the others may then be -inf. None: everything is read.
    """
    before, _State.likely = _State.likely, only
    try:
        yield
    finally:
        _State.likely = before


def likely_of() -> Tensor | None:
    """Return the tensor that says whether only the largest logit of a row is read; None where all are."""
    return _State.likely
