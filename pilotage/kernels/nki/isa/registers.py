"""Registers of the engines' sequencers: scalars for loop bounds and run-time addresses."""

from __future__ import annotations

from typing import Any

from pilotage.kernels.nki.faults import fault
from pilotage.kernels.nki.tensor import NkiTensor


class VirtualRegister:
    """A 32-bit value known at run time. `frozen` registers are the counters of loops."""

    is_register = True
    __slots__ = ("_value", "frozen")

    def __init__(self, value: int | None = None, frozen: bool = False) -> None:
        self._value = None if value is None else _wrap(int(value))
        self.frozen = frozen

    def __int__(self) -> int:
        if self._value is None:
            fault("a register is read that nothing was put into")
        return self._value

    __index__ = __int__

    def __bool__(self) -> bool:
        return int(self) != 0

    def __repr__(self) -> str:
        return f"register({self._value})"

    def put(self, value: int) -> None:
        if self.frozen:
            fault("the counter of a loop cannot be written")
        self._value = _wrap(int(value))

    def __add__(self, other: Any) -> VirtualRegister:
        return VirtualRegister(int(self) + int(other))

    def __sub__(self, other: Any) -> VirtualRegister:
        return VirtualRegister(int(self) - int(other))

    def __mul__(self, other: Any) -> VirtualRegister:
        return VirtualRegister(int(self) * int(other))

    def __rsub__(self, other: Any) -> VirtualRegister:
        return VirtualRegister(int(other) - int(self))

    __radd__, __rmul__ = __add__, __mul__


def _wrap(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31 if not -(2**31) <= value < 2**32 else value


def register_alloc(x: Any = None) -> VirtualRegister:
    """Make a register, with a value or without."""
    if isinstance(x, NkiTensor):
        fresh = VirtualRegister()
        register_load(fresh, x)
        return fresh
    return VirtualRegister(None if x is None else int(x))


def register_move(dst: Any, src: Any = None, imm: Any = None) -> None:
    """Put a constant or another register's value into a register (`imm` is the name of NKI 0.2)."""
    dst.put(int(imm if src is None else src))


def register_load(dst: Any, src: Any) -> None:
    """Put the one element of a tensor into a register."""
    if not isinstance(src, NkiTensor) or src.size != 1:
        fault(f"register_load from {src!r}", do="give a tensor of one element")
    dst.put(int(src.read().reshape(-1)[0]))


def register_store(dst: Any, src: Any) -> None:
    """Put a register's value into a tensor of one element."""
    import numpy as np

    if not isinstance(dst, NkiTensor) or dst.size != 1:
        fault(f"register_store to {dst!r}", do="give a tensor of one element")
    dst.write(np.full(dst.shape, int(src), np.int64))
