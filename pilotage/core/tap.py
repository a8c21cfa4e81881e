"""The one instrument that model code may call.

`tap(site, x)` is the identity and leaves nothing in a compiled graph unless a plan is active. A plan is fixed before
compilation; what changes between steps are the contents of its buffers, never the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TapPlan:
    """Which sites are recorded and which are replaced.

    Attributes:
        capture: site -> buffer [rows, ...]; the first rows of each are overwritten in every step.
        reference: site -> values [rows, ...] handed onward instead of the live ones where `mask` is true.
        mask: rows [rows] bool that are replaced, for all sites of `reference`.
    """

    capture: Mapping[str, Tensor] = field(default_factory=dict)
    reference: Mapping[str, Tensor] = field(default_factory=dict)
    mask: Tensor | None = None


_PLAN: TapPlan | None = None


@contextlib.contextmanager
def active(plan: TapPlan | None) -> Iterator[None]:
    """Make `plan` the active one inside the block; it must be active while the model is traced."""
    global _PLAN
    previous, _PLAN = _PLAN, plan
    try:
        yield
    finally:
        _PLAN = previous


def tapped() -> bool:
    """Whether a plan is active; layouts that a plan's rows would not fit are avoided then."""
    return _PLAN is not None


def tap(site: str, x: Tensor) -> Tensor:
    """Pass `x` [rows, ...] through, recorded or replaced as the active plan says."""
    plan = _PLAN
    if plan is None:
        return x
    import torch

    rows = x.shape[0]
    buffer = plan.capture.get(site)
    if buffer is not None:
        buffer[:rows].copy_(x.detach())
    reference = plan.reference.get(site)
    if reference is not None and plan.mask is not None:
        mask = plan.mask[:rows].reshape(rows, *([1] * (x.ndim - 1)))
        x = torch.where(mask, reference[:rows], x)
    return x
