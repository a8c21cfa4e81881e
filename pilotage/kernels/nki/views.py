"""The views of a tensor: indexing, reshaping, permuting; nothing here moves a byte."""

from __future__ import annotations

import math
from types import EllipsisType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pilotage.kernels.nki import layout, session
from pilotage.kernels.nki.dtypes import Array, DType
from pilotage.kernels.nki.faults import fault
from pilotage.kernels.nki.layout import Shape

if TYPE_CHECKING:
    from pilotage.kernels.nki.tensor import NkiTensor


class ds(NamedTuple):
    """`size` elements from `start` on."""

    start: Any
    size: int


class Views:
    """Geometry of a tensor. On chip, dimension 0 is the partition and stays in front."""

    __slots__ = ()

    if TYPE_CHECKING:
        shape: Shape
        strides: Shape
        offset: int
        ndim: int
        dtype: DType
        on_chip: bool
        dynamic: Any
        par: int

        def _like(self, shape: Shape, strides: Shape, offset: int, **changes: Any) -> NkiTensor: ...

    def is_contiguous(self) -> bool:
        """Tell whether the elements lie densely in row-major order (on chip: within each partition)."""
        first = self.par + 1 if self.on_chip else 0
        return layout.is_dense(self.shape[first:], self.strides[first:])

    def is_indirect(self) -> bool:
        """Tell whether an index of this view is known only at run time."""
        return self.dynamic is not None

    def get_pattern(self) -> list[list[int]]:
        """Give the geometry as [[stride, count], ...]."""
        return [[stride, count] for stride, count in zip(self.strides, self.shape, strict=True)]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> NkiTensor:
        keys = list(key) if isinstance(key, tuple) and not isinstance(key, ds) else [key]
        if any(isinstance(one, np.ndarray) or hasattr(one, "read32") for one in keys):
            return self._gather(keys)
        if any(isinstance(one, EllipsisType) for one in keys):
            at = next(i for i, one in enumerate(keys) if isinstance(one, EllipsisType))
            keys[at : at + 1] = [slice(None)] * (self.ndim - len(keys) + 1)
        if len(keys) > self.ndim:
            fault(f"{len(keys)} indices into {self!r}")
        keys += [slice(None)] * (self.ndim - len(keys))
        shape, strides, dropped = [], [], []
        offset, par = self.offset, self.par
        for axis, one in enumerate(keys):
            size, stride = self.shape[axis], self.strides[axis]
            if isinstance(one, ds):
                one = slice(int(one.start), int(one.start) + int(one.size))
            if isinstance(one, slice):
                self._check_static(axis, one != slice(None))
                start, stop, step = self._bounds(axis, one)
                shape.append(-(-(stop - start) // step))
                strides.append(stride * step)
                offset += start * stride
                continue
            index = self._static_index(axis, one, size)
            self._check_static(axis, True)
            offset += index * stride
            if self.on_chip and axis == self.par:
                shape.append(1)
                strides.append(stride)
            else:
                dropped.append((len(shape), stride))
                par -= axis < self.par
        least = 2 if self.on_chip else 1
        if len(shape) < least and dropped:  # the last dimension dropped stays, with one element
            at, stride = dropped[-1]
            shape.insert(at, 1)
            strides.insert(at, stride)
        return self._like(tuple(shape), tuple(strides), offset, par=par)

    def _static_index(self, axis: int, key: Any, size: int) -> int:
        try:
            index = int(key.__index__())
        except (AttributeError, TypeError):
            fault(f"{key!r} cannot index dimension {axis} of {self!r}", do="use .select or .ap for a run-time index")
        if not -size <= index < size:
            fault(f"index {index} is out of range for dimension {axis} of {self!r}")
        return index + size if index < 0 else index

    def _bounds(self, axis: int, key: slice) -> tuple[int, int, int]:
        size = self.shape[axis]
        step = 1 if key.step is None else int(key.step)
        start = 0 if key.start is None else int(key.start)
        stop = size if key.stop is None else int(key.stop)
        start, stop = start + size * (start < 0), stop + size * (stop < 0)
        if step < 1:
            fault(f"slice step {step} of dimension {axis}", do="steps are positive")
        if not (0 <= start < stop <= size):
            fault(f"slice {start}:{stop} of dimension {axis}, which has {size} elements, of {self!r}")
        return start, stop, step

    def _check_static(self, axis: int, touched: bool) -> None:
        if touched and self.dynamic is not None and self.dynamic.kind == "vector" and axis == 0:
            fault("the dimension with run-time indices cannot be sliced or selected")

    def _gather(self, keys: list[Any]) -> NkiTensor:
        from pilotage.kernels.nki.tensor import Dynamic

        if not session.core().launch.legacy and session.in_kernel():
            fault(f"index arrays into {self!r} are not in the language after NKI 0.1", do="use slices, .ap or .select")
        if self.dynamic is not None:
            fault("index arrays into a view with a run-time index")
        keys += [slice(None)] * (self.ndim - len(keys))
        trailing = sum(isinstance(one, slice | ds) for one in keys)
        flat: Array = np.asarray(self.offset, np.int64)
        valid: Array = np.asarray(True)
        sliced = 0
        for axis, one in enumerate(keys):
            if isinstance(one, slice | ds):  # the dimensions of slices come after those of the index arrays
                if isinstance(one, ds):
                    one = slice(int(one.start), int(one.start) + int(one.size))
                start, stop, step = self._bounds(axis, one)
                sliced += 1
                index = np.arange(start, stop, step).reshape([-1] + [1] * (trailing - sliced))
            else:
                index = np.asarray(one.read() if hasattr(one, "read32") else one, np.int64)
                index = index.reshape(index.shape + (1,) * trailing) if index.ndim else index
            flat = flat + index * self.strides[axis]
            valid = valid & (index >= 0) & (index < self.shape[axis])
        where = np.where(valid, flat, -1)
        dynamic = Dynamic("gather", where, 1, 0, 0)
        return self._like(where.shape, layout.row_major(where.shape), 0, dynamic=dynamic, par=0)

    # Named views.

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> NkiTensor:
        """Take `start` to `end` of one dimension."""
        keys: list[Any] = [slice(None)] * self.ndim
        keys[dim] = slice(start, end, step)
        return self[tuple(keys)]

    def select(self, dim: int, index: Any) -> NkiTensor:
        """Take one position of a dimension and drop the dimension; a tensor or a register is read at run time."""
        from pilotage.kernels.nki.tensor import Dynamic, NkiTensor

        axis = self._axis(dim)
        shape = self.shape[:axis] + self.shape[axis + 1 :]
        strides = self.strides[:axis] + self.strides[axis + 1 :]
        if not isinstance(index, NkiTensor) and not hasattr(index, "is_register"):
            self._check_static(axis, True)
            at = self._static_index(axis, index, self.shape[axis])
            return self._like(shape, strides, self.offset + at * self.strides[axis])
        if self.dynamic is not None:
            fault("only one run-time index is possible in a view")
        if self.on_chip and axis == 0:
            fault("the partition dimension cannot be selected at run time")
        dynamic = Dynamic("scalar", index, self.strides[axis], self.shape[axis], axis)
        return self._like(shape, strides, self.offset, dynamic=dynamic)

    def vector_select(self, dim: int, vector_offset: Any) -> NkiTensor:
        """Give row p of the result from row `vector_offset[p]` of this tensor in HBM."""
        from pilotage.kernels.nki.tensor import Dynamic

        if self._axis(dim) != 0 or self.on_chip or self.dynamic is not None:
            fault(f"vector_select on dimension {dim} of {self!r}", do="use dimension 0 of a plain tensor in HBM")
        dynamic = Dynamic("vector", vector_offset, self.strides[0], self.shape[0], 0)
        shape = (vector_offset.shape[0], *self.shape[1:])
        return self._like(shape, self.strides, self.offset, dynamic=dynamic)

    def indirect(self, index: Any, num_elem: int | None = None) -> NkiTensor:
        """Refused: tensor indirection came with NKI 0.5, and the documentation leaves open how groups share offsets."""
        fault(
            "tensor indirection (.indirect) is of NKI 0.5, and 0.3 is interpreted",
            do="gather with nc_n_gather, or by DMA through .ap(vector_offset=) or .vector_select",
        )

    def permute(self, dims: Any) -> NkiTensor:
        """Reorder the dimensions."""
        order = tuple(int(one) for one in dims)
        if sorted(order) != list(range(self.ndim)):
            fault(f"{order} is not a permutation of the dimensions of {self!r}")
        if self._front_is_fixed() and order[0] != 0:
            fault(
                f"permutation {order} moves the partition dimension of {self!r}", do="transpose it with an instruction"
            )
        return self._like(
            tuple(self.shape[one] for one in order), tuple(self.strides[one] for one in order), self.offset
        )

    def broadcast(self, dim: int, size: int) -> NkiTensor:
        """Repeat a dimension of one element."""
        axis = self._axis(dim)
        if self.shape[axis] != 1 or (self.on_chip and axis == 0):
            fault(
                f"dimension {dim} of {self!r} cannot be broadcast",
                do="it must have one element and not be the partition",
            )
        return self._like(
            (*self.shape[:axis], int(size), *self.shape[axis + 1 :]),
            (*self.strides[:axis], 0, *self.strides[axis + 1 :]),
            self.offset,
        )

    def broadcast_to(self, shape: Any) -> NkiTensor:
        """Repeat every dimension of one element that `shape` has longer."""
        wanted = tuple(int(one) for one in shape)
        if len(wanted) != self.ndim or any(
            have not in (1, want) for have, want in zip(self.shape, wanted, strict=True)
        ):
            fault(f"{self!r} does not broadcast to {wanted}")
        strides = tuple(
            0 if have != want else step for have, want, step in zip(self.shape, wanted, self.strides, strict=True)
        )
        return self._like(wanted, strides, self.offset)

    def expand_dim(self, dim: int) -> NkiTensor:
        """Insert a dimension of one element."""
        axis = dim + self.ndim + 1 if dim < 0 else dim
        if self._front_is_fixed() and axis == 0:
            fault(f"a dimension in front of the partition of {self!r}")
        return self._like(
            (*self.shape[:axis], 1, *self.shape[axis:]), (*self.strides[:axis], 1, *self.strides[axis:]), self.offset
        )

    def squeeze_dim(self, dim: int) -> NkiTensor:
        """Remove a dimension of one element."""
        axis = self._axis(dim)
        if self.shape[axis] != 1 or (self._front_is_fixed() and axis == 0):
            fault(f"dimension {dim} of {self!r} cannot be removed")
        return self._like(
            self.shape[:axis] + self.shape[axis + 1 :], self.strides[:axis] + self.strides[axis + 1 :], self.offset
        )

    def reshape_dim(self, dim: int, shape: Any) -> NkiTensor:
        """Split a dimension; one size may be -1."""
        axis = self._axis(dim)
        sizes = layout.infer([int(one) for one in shape], self.shape[axis])
        if sizes is None:
            fault(f"dimension {dim} of {self!r} does not split into {tuple(shape)}")
        if self._front_is_fixed() and axis == 0 and len(sizes) > 1:
            fault(f"the partition dimension of {self!r} cannot be split")
        steps = tuple(one * self.strides[axis] for one in layout.row_major(sizes))
        return self._like(
            (*self.shape[:axis], *sizes, *self.shape[axis + 1 :]),
            (*self.strides[:axis], *steps, *self.strides[axis + 1 :]),
            self.offset,
        )

    def flatten_dims(self, start_dim: int, end_dim: int) -> NkiTensor:
        """Merge dimensions `start_dim` to `end_dim`, which must lie densely."""
        first, last = self._axis(start_dim), self._axis(end_dim)
        merged = math.prod(self.shape[first : last + 1])
        return self._reshaped((*self.shape[:first], merged, *self.shape[last + 1 :]))

    def reshape(self, shape: Any, *more: int) -> NkiTensor:
        """Show the same elements in another shape, without a copy."""
        asked = [int(one) for one in ((shape, *more) if isinstance(shape, int) else shape)]
        sizes = layout.infer(asked, math.prod(self.shape))
        if sizes is None:
            fault(f"{self!r} has {math.prod(self.shape)} elements and cannot be reshaped to {tuple(asked)}")
        return self._reshaped(sizes)

    def _reshaped(self, shape: Shape) -> NkiTensor:
        fixed = 1 if self._front_is_fixed() else 0
        if fixed and shape[0] != self.shape[0]:
            fault(f"reshaping {self!r} to {shape} changes the partition dimension", do="move data between partitions")
        strides = layout.restride(self.shape[fixed:], self.strides[fixed:], shape[fixed:])
        if strides is None:
            fault(f"{self!r} with strides {self.strides} is not contiguous enough for the shape {shape}")
        return self._like(shape, self.strides[:fixed] + strides, self.offset)

    def rearrange(self, src_pattern: Any, dst_pattern: Any, fixed_sizes: dict[str, int] | None = None) -> NkiTensor:
        """Split, reorder and merge dimensions by name: ("b", ("h", "w")) to ("b", "w", "h")."""
        known = dict(fixed_sizes or {})
        if len(src_pattern) != self.ndim:
            fault(f"pattern {src_pattern} for {self!r}")
        out: Any = self
        names: list[str] = []
        for size, one in zip(self.shape, src_pattern, strict=True):
            group = (one,) if isinstance(one, str) else tuple(one)
            sizes = layout.infer([known.get(name, -1) if len(group) > 1 else size for name in group], size)
            if sizes is None:
                fault(f"{group} does not split a dimension of {size}", do="give all sizes of a group but one")
            out = out.reshape_dim(len(names), sizes)
            names += group
        wanted = [name for one in dst_pattern for name in ((one,) if isinstance(one, str) else one)]
        if sorted(wanted) != sorted(names):
            fault(f"{dst_pattern} does not name the dimensions {names}")
        out = out.permute(tuple(names.index(name) for name in wanted))
        for axis, one in enumerate(dst_pattern):
            if not isinstance(one, str):
                out = out.flatten_dims(axis, axis + len(one) - 1)
        return out  # type: ignore[no-any-return]

    def _axis(self, dim: int) -> int:
        axis = dim + self.ndim if dim < 0 else dim
        if not 0 <= axis < self.ndim:
            fault(f"{self!r} has no dimension {dim}")
        return axis

    def _front_is_fixed(self) -> bool:
        return (self.on_chip and self.par == 0) or (self.dynamic is not None and self.dynamic.kind == "vector")
