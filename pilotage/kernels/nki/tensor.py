"""Tensors of NKI: strided views over storage, read and written by the instructions."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from pilotage.kernels.nki import layout
from pilotage.kernels.nki.arithmetic import Arithmetic
from pilotage.kernels.nki.dtypes import Array, DType, convert, resolve, widen
from pilotage.kernels.nki.faults import fault
from pilotage.kernels.nki.layout import Shape
from pilotage.kernels.nki.memory import BY_ENGINE, MemoryRegion, Storage
from pilotage.kernels.nki.views import Views


class Dynamic(NamedTuple):
    """An address that is known only when the instruction runs.

    `kind` is "scalar" (one index, added everywhere), "vector" (one index a row of dimension 0) or "gather" (an array of
    element positions, from the index arrays of NKI 0.1). `stride` elements separate neighbouring indices, `limit` is
    how many there are.
    """

    kind: str
    index: Any
    stride: int
    limit: int
    dim: int


class NkiTensor(Views, Arithmetic):
    """A view: shape, strides, offset and data type over storage that other views may share."""

    __slots__ = ("_cached", "_shape", "dtype", "dynamic", "name", "offset", "par", "storage", "strides")

    def __init__(
        self,
        storage: Storage,
        shape: Shape,
        strides: Shape,
        offset: int = 0,
        dtype: DType | None = None,
        dynamic: Dynamic | None = None,
        par: int = 0,
    ) -> None:
        self.storage = storage
        self._shape = shape
        self.strides = strides
        self.offset = offset
        self.dtype = dtype or storage.dtype
        self.dynamic = dynamic
        self.par = par  # position of the partition dimension; more than 0 only for the block dimensions of NKI 0.1
        self.name = storage.name
        self._cached: Array | None = None

    @classmethod
    def whole(cls, storage: Storage, par: int = 0) -> NkiTensor:
        """View all of a storage in its own shape."""
        return cls(storage, storage.shape, layout.row_major(storage.shape), par=par)

    @property
    def shape(self) -> Shape:
        return self._shape

    @property
    def buffer(self) -> MemoryRegion:
        return self.storage.buffer

    @property
    def ndim(self) -> int:
        return len(self._shape)

    @property
    def size(self) -> int:
        return math.prod(self._shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def on_chip(self) -> bool:
        return self.storage.buffer.on_chip

    @property
    def partitions(self) -> int:
        return self._shape[0]

    @property
    def per_partition(self) -> int:
        return math.prod(self._shape[1:])

    def __repr__(self) -> str:
        return f"NkiTensor({self._shape}, {self.dtype}, {self.buffer.value}{', ' + self.name if self.name else ''})"

    # Views share everything but their geometry.

    def _like(self, shape: Shape, strides: Shape, offset: int, **changes: Any) -> NkiTensor:
        settings: dict[str, Any] = {"dtype": self.dtype, "dynamic": self.dynamic, "par": self.par} | changes
        return NkiTensor(self.storage, shape, strides, offset, **settings)

    def view(self, dtype: Any) -> NkiTensor:
        """Reinterpret the bits; the last dimension, which must be dense, changes length with the element size."""
        wanted = resolve(dtype)
        have, want = self.dtype.itemsize, wanted.itemsize
        if self.dynamic is not None:
            fault("a view with a run-time index cannot be reinterpreted")
        self._check_reinterpretable(wanted)
        if have == want:
            return self._like(self._shape, self.strides, self.offset, dtype=wanted)
        if self._shape[-1] != 1 and self.strides[-1] != 1:
            fault(f"the last dimension of {self!r} is not contiguous", do="reinterpret before slicing")
        if have > want:
            scale = have // want
            strides = (*(one * scale for one in self.strides[:-1]), 1)
            shape = (*self._shape[:-1], self._shape[-1] * scale)
            return self._like(shape, strides, self.offset * scale, dtype=wanted)
        scale = want // have
        if self._shape[-1] % scale or self.offset % scale or any(one % scale for one in self.strides[:-1]):
            fault(f"{self!r} does not divide into elements of {want} bytes")
        strides = (*(one // scale for one in self.strides[:-1]), 1)
        return self._like((*self._shape[:-1], self._shape[-1] // scale), strides, self.offset // scale, dtype=wanted)

    def reinterpret_cast(self, dtype: Any) -> NkiTensor:
        """The same as `view`."""
        return self.view(dtype)

    def _check_reinterpretable(self, wanted: DType) -> None:
        if wanted.held.itemsize != wanted.itemsize or self.storage.dtype.held.itemsize != self.storage.dtype.itemsize:
            fault(
                f"{self!r} is held in float32 and has no bits to reinterpret as {wanted!r}",
                do="leave NKI_PRECISE_FP at 1 for this kernel",
            )

    def ap(
        self,
        pattern: Any,
        offset: int | None = None,
        scalar_offset: Any = None,
        vector_offset: Any = None,
        indirect_dim: int = 0,
        dtype: Any = None,
    ) -> NkiTensor:
        """View the storage through an explicit [[stride, count], ...] pattern.

        An explicit `offset` is added to the offset of the view that this is called on. A run-time offset counts
        positions of dimension `indirect_dim` of that view.
        """
        wanted = self.dtype if dtype is None else resolve(dtype)
        if wanted is not self.dtype:
            self._check_reinterpretable(wanted)
        shape = tuple(int(count) for _, count in pattern)
        strides = tuple(int(step) for step, _ in pattern)
        base = self.offset * self.dtype.itemsize // wanted.itemsize
        if scalar_offset is not None and vector_offset is not None:
            fault("an access pattern takes a scalar_offset or a vector_offset, not both")
        dynamic = None
        if scalar_offset is not None or vector_offset is not None:
            if not 0 <= indirect_dim < self.ndim:
                fault(f"indirect_dim {indirect_dim} is not a dimension of {self!r}")
            stride = self.strides[indirect_dim] * self.dtype.itemsize // wanted.itemsize
            kind = "scalar" if scalar_offset is not None else "vector"
            if kind == "vector" and indirect_dim != 0:
                fault(f"vector_offset with indirect_dim {indirect_dim}", do="only dimension 0 takes one index a row")
            index = scalar_offset if kind == "scalar" else vector_offset
            dynamic = Dynamic(kind, index, stride, self._shape[indirect_dim], indirect_dim)
        if self.on_chip and self.par == 0 and len(shape) > 1 and shape[0] > 1:
            lane = self.storage.lane * self.storage.dtype.itemsize // wanted.itemsize
            if strides[0] != lane:
                fault(
                    f"an access pattern strides {strides[0]} over the partitions of {self!r}, {lane} apart",
                    do="every partition must be read: use its free size as the first stride",
                )
        return self._like(shape, strides, base + int(offset or 0), dtype=wanted, dynamic=dynamic, par=0)

    # Values. `array` is the place itself, `read` and `write` go through run-time addresses as well.

    def array(self) -> Array:
        """Give the elements as a numpy view of the storage (a scalar run-time offset is resolved)."""
        if self._cached is not None:
            return self._cached
        offset = self.offset
        if self.dynamic is not None:
            if self.dynamic.kind != "scalar":
                fault(
                    f"{self!r} is addressed row by row at run time", do="only DMA reads and writes through such a view"
                )
            offset += self._scalar() * self.dynamic.stride
        held = self.dtype.held
        low, high = layout.reach(self._shape, self.strides, offset)
        if low < 0 or (high + 1) * held.itemsize > self.storage.raw.size:
            fault(
                f"the view {self._shape} reaches element {low if low < 0 else high} of a tensor with "
                f"{self.storage.raw.size // held.itemsize}: {self.storage.name or 'unnamed'} {self.storage.shape}",
            )
        out: Array = np.ndarray(
            self._shape, held, self.storage.raw, offset * held.itemsize, [one * held.itemsize for one in self.strides]
        )
        if self.dynamic is None:
            self._cached = out
        return out

    def _scalar(self) -> int:
        assert self.dynamic is not None
        index = self.dynamic.index
        value = int(index.read().reshape(-1)[0]) if isinstance(index, NkiTensor) else int(index)
        if not 0 <= value < self.dynamic.limit:
            fault(f"run-time index {value} is out of range for a dimension of {self.dynamic.limit}")
        return value

    def positions(self, skip: bool = False) -> tuple[Array, Array | None]:
        """Give the element position of everything in a row-by-row or gathered view, and which are in range.

        Raises:
            NkiValidationError: something is out of range and `skip` is not set.
        """
        assert self.dynamic is not None and self.dynamic.kind != "scalar"
        if self.dynamic.kind == "gather":
            flat = self.dynamic.index
            total = self.storage.raw.size // self.dtype.held.itemsize
            valid = (flat >= 0) & (flat < total)
        else:
            rows = self.dynamic.index.read().astype(np.int64)
            rows = rows.T.reshape(-1)[: self._shape[0]]
            if rows.size != self._shape[0]:
                fault(f"{rows.size} run-time indices for {self._shape[0]} rows")
            flat = np.full((1,) * self.ndim, self.offset, np.int64)
            for axis in range(1, self.ndim):
                lane = np.arange(self._shape[axis], dtype=np.int64) * self.strides[axis]
                flat = flat + lane.reshape([-1 if at == axis else 1 for at in range(self.ndim)])
            per_row = rows.reshape([-1] + [1] * (self.ndim - 1))
            flat = flat + per_row * self.dynamic.stride
            valid = np.broadcast_to((per_row >= 0) & (per_row < self.dynamic.limit), flat.shape)
        if valid.all():
            return flat, None
        if not skip:
            bad = (
                flat[~valid].reshape(-1)[0]
                if self.dynamic.kind == "gather"
                else rows[(rows < 0) | (rows >= self.dynamic.limit)][0]
            )
            fault(f"run-time index {bad} is out of range for {self!r}", do="oob_mode.skip leaves such rows untouched")
        return np.where(valid, flat, 0), valid

    def read(self) -> Array:
        """Give the values; never write into what this returns."""
        if self.dynamic is None or self.dynamic.kind == "scalar":
            return self.array()
        flat, _ = self.positions()
        out: Array = self._flat()[flat]
        return out

    def read32(self) -> Array:
        """Give the values in float32."""
        return widen(self.read())

    def write(self, values: Array, state: int = BY_ENGINE) -> None:
        """Put values of the same count in, converted to the data type."""
        if values.shape != self._shape:
            values = values.reshape(self._shape)
        if self.dynamic is not None and self.dynamic.kind != "scalar":
            flat, _ = self.positions()
            self._flat()[flat] = convert(values, self.dtype)
            return
        self.array()[...] = convert(values, self.dtype)
        if self.storage.state is not None:
            self.states()[...] = state

    def _flat(self) -> Array:
        held = self.dtype.held
        return np.ndarray((self.storage.raw.size // held.itemsize,), held, self.storage.raw)

    def states(self) -> Array:
        """Give who wrote each element of a PSUM view, as a view that can be assigned to."""
        width = self.dtype.held.itemsize
        out: Array = np.ndarray(
            self._shape, np.uint8, self.storage.state, self.offset * width, [one * width for one in self.strides]
        )
        return out
