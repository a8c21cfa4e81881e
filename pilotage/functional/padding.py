"""Rows of padding: a graph has a fixed number of token rows, and a step rarely fills it.

Inside `padded` an implementation may leave out what nobody looks at: the rows of a bucket after its last token.
The definitions compute them like all others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor


class _State:
    num_rows = 0
    ends: Tensor | None = None


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
