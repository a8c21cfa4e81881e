"""One product for linear layers that share their input.

`pack` moves the weights of a group into one storage and makes each parameter a view of its part: still the same
Parameter, so names, ties and loaders survive. `project` then computes the group in one product, and separately where it
is not packed. Whatever could part the views from the storage (moving, casting, replacing, assigning a state dict, deep
copies) takes the packing apart, so that a packed group is never stale; `pack` again after it. Where a gradient is
wanted the members are computed separately. Forward hooks of the members do not run while they are packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

import pilotage.functional as NF
from pilotage.parallel import enter

_SLOT = "packed"  # kept in __dict__: neither a parameter nor a buffer, so absent from state dicts
_JOINING: ContextVar[bool] = ContextVar("joining", default=False)


class Packed:
    """The common storage of a group.

    Attributes:
        weight: [sum of output features, D].
        bias: [sum of output features] or None.
        sizes: output features of each member.
        members: the layers, in order.
    """

    def __init__(self, members: tuple[Any, ...]) -> None:
        weights, biases = [m.weight for m in members], [m.bias for m in members]
        self.members = members
        self.sizes: tuple[int, ...] = tuple(w.shape[0] for w in weights)
        with torch.no_grad():
            self.weight = torch.cat([w.detach() for w in weights])
            self.bias = torch.cat([b.detach() for b in biases]) if biases[0] is not None else None
            for parameters, whole in ((weights, self.weight), (biases, self.bias)):
                if whole is not None:
                    for parameter, part in zip(parameters, whole.split(self.sizes), strict=True):
                        parameter.data = part

    @property
    def intact(self) -> bool:
        """Whether every member still is its part of the storage."""
        parts = self.weight.split(self.sizes)
        return all(m.weight.data_ptr() == part.data_ptr() for m, part in zip(self.members, parts, strict=True))

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        # The copied parameters get storages of their own.
        return None


def pack(*members: Any) -> bool:
    """Pack layers that share their input; does nothing if they are packed already.

    Args:
        members: linear layers with [out, D] weights on a real device; all with a bias or none.

    Returns:
        Whether they are packed now: False where one has a bias and another none, the dtypes differ, or a member is not
        a `ColumnParallelLinear`, which is what takes a packing apart in time.
    """
    if not all(hasattr(member, "local") for member in members):
        return False
    packed = members[0].__dict__.get(_SLOT)
    if packed is not None and packed.members == members and packed.intact:
        return True
    if len({m.bias is None for m in members}) > 1 or len({m.weight.dtype for m in members}) > 1:
        return False
    for member in members:
        unpack(member)
    packed = Packed(members)
    for member in members:
        member.__dict__[_SLOT] = packed
    return True


def unpack(member: nn.Module) -> None:
    """Compute the group of `member` separately from now on; the weights stay where they are."""
    packed = member.__dict__.get(_SLOT)
    if packed is not None:
        for other in packed.members:
            other.__dict__[_SLOT] = None


def _packed(members: tuple[Any, ...]) -> Packed | None:
    packed = members[0].__dict__.get(_SLOT)
    if packed is None or len(packed.members) != len(members):
        return None
    if torch.is_grad_enabled() and members[0].weight.requires_grad:
        return None  # the storage is not a parameter: a product with it would lose the members' gradients
    return packed if all(a is b for a, b in zip(packed.members, members, strict=True)) else None


@contextmanager
def joined() -> Iterator[None]:
    """Compute groups of plain linear layers in one product inside the block, over weights put together for each call.

    Which rounds as the packed layers of a server do, and has gradients: now and then an output of a half precision
    depends on how many others its product has.
    """
    token = _JOINING.set(True)
    try:
        yield
    finally:
        _JOINING.reset(token)


def _joined(members: tuple[Any, ...]) -> tuple[Tensor, Tensor | None] | None:
    """Put the weights and biases of plain layers together, where a server would pack them and `joined` asks for it."""
    if not _JOINING.get() or not all(type(member) is nn.Linear for member in members):
        return None
    biases = [member.bias for member in members if member.bias is not None]
    if len(biases) not in (0, len(members)):
        return None
    return torch.cat([member.weight for member in members]), torch.cat(biases) if biases else None


def project(x: Tensor, *members: Any) -> tuple[Tensor, ...]:
    """Compute several linear layers of one input: one product where they are packed.

    Args:
        x: [..., D].
        members: the layers, e.g. q_proj, k_proj, v_proj.

    Returns:
        One output per member, as the member itself would give.
    """
    packed = _packed(members)
    if packed is not None:
        return NF.qkv_proj(enter(x, members[0].wants), packed.weight, packed.bias, sizes=packed.sizes)
    if all(hasattr(member, "local") for member in members):
        x = enter(x, members[0].wants)  # once for the group
        return tuple(member.local(x) for member in members)
    together = _joined(members)
    if together is not None:
        return NF.qkv_proj(x, *together, sizes=tuple(member.out_features for member in members))
    return tuple(member(x) for member in members)


def gated_mlp(x: Tensor, gate: nn.Module, up: nn.Module, down: Any, *, activation: str) -> Tensor:
    """Compute down(activation(gate(x)) * up(x)): as one operator where gate and up are packed.

    Args:
        x: [..., D].
        gate, up: [F, D] layers; down: a [D, F] one, row-parallel if it communicates.
        activation: Hugging Face name.

    Returns:
        [..., D].
    """
    packed = _packed((gate, up))
    if packed is not None and hasattr(down, "reduce"):
        return down.reduce(
            NF.mlp(
                enter(x, down.component),
                packed.weight,
                down.weight,
                packed.bias,
                down.inner_bias,
                activation=activation,
            )
        )
    together = _joined((gate, up)) if type(down) is nn.Linear else None
    if together is not None:
        weight, bias = together
        return NF.mlp(x, weight, down.weight, bias, down.bias, activation=activation)
    return down(NF.gated_activation(*project(x, gate, up), activation=activation))
