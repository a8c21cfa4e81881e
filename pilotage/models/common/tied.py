"""One gradient of a weight that is embedding and head at once, instead of two that are added up.

Plain autograd makes a gradient of the size of the vocabulary for the look-up, nearly all of it zeros, a second for the
head, and a third for their sum. Here the few rows that were looked up go into the head's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# Of the weight that a forward of a tied model looked tokens up in the name that the head is to use.
_shared: ContextVar[dict[Tensor, Tensor] | None] = ContextVar("shared weight", default=None)


@contextlib.contextmanager
def one_gradient(embedding: nn.Module, head: nn.Module) -> Iterator[None]:
    """Let embedding and head share a gradient inside, if they are tied and autograd records."""
    tied = getattr(embedding, "weight", None) is getattr(head, "weight", embedding)
    if not tied or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        yield
        return
    before = _shared.set({})
    try:
        yield
    finally:
        _shared.reset(before)


def for_lookup(weight: Tensor) -> tuple[Tensor, bool]:
    """Return what the embedding looks up in, and whether the gradient of it may be sparse."""
    uses = _shared.get()
    if uses is None or isinstance(weight, DTensor) or not weight.requires_grad:
        return weight, False
    looked_up, uses[weight] = _Shared.apply(weight)
    return looked_up, True


def for_head(weight: Tensor) -> Tensor:
    """Return what the head multiplies by: the weight, by the name that shares its gradient if there is one."""
    return (_shared.get() or {}).get(weight, weight)


class Head(nn.Linear):
    """`nn.Linear` whose weight may be the embedding's as well."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Project rows [..., in] -> [..., out]."""
        return nn.functional.linear(hidden, for_head(self.weight), self.bias)


class _Shared(torch.autograd.Function):
    """Two names of one weight: the first for looking up, the second for a product."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return weight.view_as(weight), weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, looked_up: Tensor | None, projected: Tensor | None) -> Tensor | None:
        if looked_up is None:
            return projected
        if projected is None:
            return looked_up.to_dense()
        if torch.is_grad_enabled():  # of a gradient that is differentiated in its turn nothing may be written into
            return projected + looked_up.to_dense()
        return _add_rows(projected, looked_up)


def _add_rows(dense: Tensor, sparse: Tensor) -> Tensor:
    """Add rows to a gradient that nothing else holds, in place.

    Numerics: rows of one token are summed in fp32 with what is there, and rounded once.
    """
    tokens, place = sparse._indices()[0].unique(return_inverse=True)
    rows = dense.index_select(0, tokens).float().index_add_(0, place, sparse._values().float())
    return dense.index_copy_(0, tokens, rows.to(dense.dtype))
