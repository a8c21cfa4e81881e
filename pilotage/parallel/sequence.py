"""Which token rows a rank has between the parallel layers, and how layers get and give them.

In a prefill each rank keeps a share of the rows (sequence parallelism): norms and residuals then work on T / ranks
rows; a layer group gathers rows before its products and scatters its sum after. Outside `rows_divided` every rank has
all rows, and the same calls are nothing and an all-reduce, which is what decode wants. A component that is held in
several replicas (`layout`) gathers only the rows of its replica, or takes these out of all, and puts them back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from pilotage.parallel.group import get_tp_group
from pilotage.parallel.layout import Component


class _State:
    divided = False
    num_rows: int | None = None


@contextmanager
def rows_divided(divided: bool, num_rows: int | None = None) -> Iterator[None]:
    """Divide token rows over the ranks between parallel layers, or do not, inside the block.

    Args:
        divided: whether ranks keep shares.
        num_rows: T of the step. Without it replicas of a component do not share the work where rows are not divided.
    """
    before = _State.divided, _State.num_rows
    _State.divided, _State.num_rows = divided, num_rows
    try:
        yield
    finally:
        _State.divided, _State.num_rows = before


def enter(x: Tensor, component: Component | None = None) -> Tensor:
    """Give a parallel layer its rows: [T / ranks, ...] or [T, ...] -> [T, ...], or [T / replicas, ...] of a replica."""
    if component is None or component.dp.process_group is None:
        return get_tp_group().all_gather(x, dim=0) if _State.divided else x
    return component.tp.all_gather(x, dim=0) if _State.divided else own_rows(x, component)


def leave(partial: Tensor, component: Component | None = None) -> Tensor:
    """Sum the ranks' partial results of the rows of `enter` and keep what `rows_divided` says: this rank's, or all."""
    if component is None or component.dp.process_group is None:
        group = get_tp_group()
        return group.reduce_scatter(partial, dim=0) if _State.divided else group.all_reduce(partial)
    if _State.divided:
        return component.tp.reduce_scatter(partial, dim=0)
    total = component.tp.all_reduce(partial)
    return component.dp.all_gather(total, dim=0) if shares_rows(component) else total


def shares_rows(component: Component | None) -> bool:
    """Whether a replica of the component does a part of the rows of this step."""
    if component is None or component.dp.process_group is None:
        return False
    return _State.divided or (_State.num_rows is not None and _State.num_rows % component.dp.world_size == 0)


def own_rows(x: Tensor, component: Component | None) -> Tensor:
    """Take the rows of this rank's replica out of all rows [T, ...], where replicas share them."""
    if component is None or not shares_rows(component):
        return x
    count = x.shape[0] // component.dp.world_size
    return x.narrow(0, component.dp.rank * count, count)
