"""Assignment and arithmetic on tiles.

NKI 0.1 writes `tile[...] = nisa.f(...)`, `acc += nisa.nc_matmul(...)` and `a * b`; from 0.2 on only assignment is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pilotage.kernels.nki import session
from pilotage.kernels.nki.faults import fault
from pilotage.kernels.nki.memory import BY_ENGINE, BY_MATMUL, UNWRITTEN, MemoryRegion
from pilotage.kernels.nki.operators import OPERATORS, quiet

if TYPE_CHECKING:
    from pilotage.kernels.nki.tensor import NkiTensor


class Arithmetic:
    """What Python's operators mean for tiles."""

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        from pilotage.kernels.nki.tensor import NkiTensor

        place: NkiTensor = self[key]  # type: ignore[index]
        if not isinstance(value, NkiTensor):
            place.write(np.broadcast_to(np.asarray(value, np.float32), place.shape))
            return
        if value.storage is place.storage and (value.offset, value.strides, value.shape) == (
            place.offset, place.strides, place.shape,
        ):  # fmt: skip
            return  # `t[k] += x` has already been done in place
        if value.size != place.size:
            fault(f"{value!r} is assigned to {place!r}", do="they need equally many elements")
        from_matmul = (
            value.storage.state is not None
            and place.storage.state is not None
            and bool((value.states() == BY_MATMUL).all())
        )
        place.write(value.read().copy(), BY_MATMUL if from_matmul else BY_ENGINE)

    def __iadd__(self, other: Any) -> NkiTensor:
        mine: NkiTensor = self  # type: ignore[assignment]
        _only_legacy("+=")
        value = other.read32().reshape(mine.shape) if hasattr(other, "read32") else np.float32(other)
        before = mine.read32()
        with quiet():
            total = before + value
        if mine.buffer is MemoryRegion.psum and mine.storage.state is not None:
            total = np.where(mine.states() == UNWRITTEN, value, total)
            mine.write(total, BY_MATMUL)
        else:
            mine.write(total)
        return mine

    def _binary(self, name: str, left: Any, right: Any) -> NkiTensor:
        from pilotage.kernels.nki.functions import apply

        _only_legacy(name)
        return apply(OPERATORS[name], left, right)

    def __add__(self, other: Any) -> NkiTensor:
        return self._binary("add", self, other)

    def __radd__(self, other: Any) -> NkiTensor:
        return self._binary("add", other, self)

    def __sub__(self, other: Any) -> NkiTensor:
        return self._binary("subtract", self, other)

    def __rsub__(self, other: Any) -> NkiTensor:
        return self._binary("subtract", other, self)

    def __mul__(self, other: Any) -> NkiTensor:
        return self._binary("multiply", self, other)

    def __rmul__(self, other: Any) -> NkiTensor:
        return self._binary("multiply", other, self)

    def __truediv__(self, other: Any) -> NkiTensor:
        return self._binary("divide", self, other)

    def __rtruediv__(self, other: Any) -> NkiTensor:
        return self._binary("divide", other, self)

    def __neg__(self) -> NkiTensor:
        return self._binary("multiply", self, -1.0)

    def __lt__(self, other: Any) -> NkiTensor:
        return self._binary("less", self, other)

    def __le__(self, other: Any) -> NkiTensor:
        return self._binary("less_equal", self, other)

    def __gt__(self, other: Any) -> NkiTensor:
        return self._binary("greater", self, other)

    def __ge__(self, other: Any) -> NkiTensor:
        return self._binary("greater_equal", self, other)


def _only_legacy(name: str) -> None:
    if session.in_kernel() and not session.core().launch.legacy:
        fault(f"{name} on tiles is not in the language after NKI 0.1", do="use nl or nisa functions")
