"""The one instrument that model code may call.

`tap(site, x)` is the identity and leaves nothing in a compiled graph unless a plan is active. A plan is fixed before
compilation; what changes between steps are the contents of its buffers, never the graph. `get_replacement_tensor` is
the same seam by the name that the tensor replacement document gives it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TapPlan:
    """Which sites are recorded and which are replaced.

    Attributes:
        capture: site -> buffer [rows, ...]; the first rows of each are overwritten in every step.
        reference: site -> values [rows, ...] handed onward instead of the live ones where `mask` is true.
        mask: rows [rows] bool that are replaced, for all sites of `reference`.
        masks: site -> its own mask, instead of `mask`.
        listener: called with (site, x) instead of all this, gives what is handed onward; only for runs that are not
            compiled.
    """

    capture: Mapping[str, Tensor] = field(default_factory=dict)
    reference: Mapping[str, Tensor] = field(default_factory=dict)
    mask: Tensor | None = None
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    listener: Callable[[str, Tensor], Tensor] | None = None


_PLAN: TapPlan | None = None
# Site -> reference rows; a plain dictionary, or one with masks (`probe.replacement.ReplacementContext`).
_CONTEXT: Any = None
# Told which names `get_replacement_tensor` was asked for, and whether with a live value; see `asking`.
_ASKED: Callable[[str, bool], None] | None = None


@contextlib.contextmanager
def active(plan: TapPlan | None) -> Iterator[None]:
    """Make `plan` the active one inside the block; it must be active while the model is traced and while it runs."""
    global _PLAN
    previous, _PLAN = _PLAN, plan
    try:
        yield
    finally:
        _PLAN = previous


@contextlib.contextmanager
def asking(asked: Callable[[str, bool], None]) -> Iterator[None]:
    """Have `asked(name, live was given)` called by every `get_replacement_tensor` inside the block."""
    global _ASKED
    previous, _ASKED = _ASKED, asked
    try:
        yield
    finally:
        _ASKED = previous


def tapped() -> bool:
    """Whether a plan or a replacement is active; layouts that its rows would not fit are avoided then."""
    return _PLAN is not None or _CONTEXT is not None


def tap(site: str, x: Tensor) -> Tensor:
    """Pass `x` [rows, ...] through, recorded or replaced as the active plan and the active context say."""
    plan = _PLAN
    if plan is not None:
        if plan.listener is not None:
            return plan.listener(site, x)
        buffer = plan.capture.get(site)
        if buffer is not None:
            _first(buffer, x.shape[0]).copy_(x.detach())
        if site in plan.reference:
            x = _from_plan(plan, site, x)
    return x if _CONTEXT is None else _from_context(site, x)


def set_active_context(context: Mapping[str, Tensor] | None) -> None:
    """Hand the rows of `context` onward from now on; None ends it.

    Args:
        context: site -> [rows, ...], as `TensorReplacer.build_context` gives it.
    """
    global _CONTEXT
    _CONTEXT = context


def get_replacement_tensor(name: str, live: Tensor | None = None) -> Any:
    """Return what is handed onward at `name` in this step.

    Args:
        name: e.g. "model.layers.0.mlp.router".
        live: what the model computed, [rows, ...].

    Returns:
        With `live`: the reference in its dtype where a row has one, the live value elsewhere, and `live` itself when
        there is no replacement of this name. Without it: the documented tensor, which is zero in rows without a
        reference, or None when there is no replacement of this name.
    """
    if _ASKED is not None:
        _ASKED(name, live is not None)
    plan = _PLAN
    if plan is not None and name in plan.reference:
        return plan.reference[name] if live is None else _from_plan(plan, name, live)
    if _CONTEXT is None:
        return live
    return _CONTEXT.get(name) if live is None else _from_context(name, live)


def _from_plan(plan: TapPlan, name: str, live: Tensor) -> Tensor:
    mask = plan.masks.get(name, plan.mask)
    return live if mask is None else _merged(plan.reference[name], mask, live)


def _from_context(name: str, live: Tensor) -> Tensor:
    reference = _CONTEXT.get(name)
    if reference is None:
        return live
    masks = getattr(_CONTEXT, "masks", None)
    if masks is None:
        return _first(reference, live.shape[0]).to(live.dtype)
    return _merged(reference, masks[name], live)


def _merged(reference: Tensor, mask: Tensor, live: Tensor) -> Tensor:
    import torch

    rows = live.shape[0]
    chosen = _first(mask, rows).reshape(rows, *([1] * (live.ndim - 1)))
    # `where`, never a product: NaN in a row that is not chosen must not leak.
    return torch.where(chosen, _first(reference, rows).to(live.dtype), live)


def _first(buffer: Tensor, rows: int) -> Tensor:
    return buffer if buffer.shape[0] == rows else buffer[:rows]
