"""Sequence parallelism: between the parallel layers of a prefill each rank keeps a share of the token rows.

Norms and residuals then work on T / ranks rows; a layer group gathers the rows before its products and scatters its sum
after. Outside `rows_divided` the same calls are nothing and an all-reduce, which is what decode wants.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from pilotage.parallel.group import get_tp_group


class _State:
    divided = False


@contextmanager
def rows_divided(divided: bool) -> Iterator[None]:
    """Divide token rows over the ranks between parallel layers, or do not, inside the block."""
    before, _State.divided = _State.divided, divided
    try:
        yield
    finally:
        _State.divided = before


def enter(x: Tensor) -> Tensor:
    """Give a parallel layer all rows: [T / ranks, ...] -> [T, ...] where rows are divided, else x."""
    return get_tp_group().all_gather(x, dim=0) if _State.divided else x


def leave(partial: Tensor) -> Tensor:
    """Sum the ranks' partial results [T, ...] and keep what `rows_divided` says: this rank's rows, or all."""
    group = get_tp_group()
    return group.reduce_scatter(partial, dim=0) if _State.divided else group.all_reduce(partial)
