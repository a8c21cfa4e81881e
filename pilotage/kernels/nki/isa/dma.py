"""Transfers between HBM and the core's memories."""

from __future__ import annotations

from typing import Any

import numpy as np

from pilotage.kernels.nki import layout, session
from pilotage.kernels.nki.dtypes import Array, convert
from pilotage.kernels.nki.faults import fault
from pilotage.kernels.nki.hardware import nc_version
from pilotage.kernels.nki.isa import checks
from pilotage.kernels.nki.isa.constants import dge_mode, engine, oob_mode
from pilotage.kernels.nki.memory import MemoryRegion
from pilotage.kernels.nki.operators import OPERATORS, Op, operator
from pilotage.kernels.nki.tensor import NkiTensor

_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}
_LEAST_RUN = 64  # bytes below which a descriptor costs as much as one of this size


def _place(what: str, label: str, value: Any) -> NkiTensor:
    if not isinstance(value, NkiTensor):
        fault(f"{what}: {label} is {value!r}, not a tensor")
    if value.buffer is MemoryRegion.psum and not session.core().launch.legacy:
        fault(f"{what}: {label} is in PSUM", do="DMA reaches HBM and SBUF; use tensor_copy first")
    return value


def _rows(value: NkiTensor) -> bool:
    return value.dynamic is not None and value.dynamic.kind != "scalar"


def _move(dst: NkiTensor, src: NkiTensor, mode: Any, combine: Op | None = None) -> None:
    """Carry elements in order; rows whose run-time index is out of range stay as they are under `skip`."""
    skip = mode is oob_mode.skip
    if skip and _scalar_out_of_range(dst, src):
        return
    keep: Array | None = None
    if _rows(src):
        flat, keep = src.positions(skip)
        values = src._flat()[flat]
    else:
        values = src.read()
    values = values.reshape(dst.shape)
    if dst.storage is src.storage:
        values = values.copy()
    if keep is not None:
        keep = np.broadcast_to(keep, src.shape).reshape(dst.shape)
    if src.dtype is not dst.dtype:
        values = convert(values.astype(np.float32), dst.dtype)
    if not _rows(dst):
        place = dst.array()
        new = convert(values, dst.dtype) if combine is None else _joined(combine, place, values, dst)
        np.copyto(place, new, where=True if keep is None else keep)
        if dst.storage.state is not None:
            dst.write(place)
        return
    flat, valid = dst.positions(skip)
    whole = dst._flat()
    new = convert(values, dst.dtype) if combine is None else _joined(combine, whole[flat], values, dst)
    where = np.broadcast_to(np.asarray(True) if valid is None else valid, dst.shape)
    if keep is not None:
        where = where & keep
    flat = np.broadcast_to(flat, dst.shape)
    whole[flat[where]] = np.broadcast_to(new, dst.shape)[where]


def _scalar_out_of_range(*views: NkiTensor) -> bool:
    for one in views:
        if one.dynamic is not None and one.dynamic.kind == "scalar":
            index = one.dynamic.index
            value = int(index.read().reshape(-1)[0]) if isinstance(index, NkiTensor) else int(index)
            if not 0 <= value < one.dynamic.limit:
                return True
    return False


def _joined(op: Op, before: Array, values: Array, dst: NkiTensor) -> Array:
    return convert(op.function(before.astype(np.float32), values.astype(np.float32)), dst.dtype)


def _charge(what: str, dst: NkiTensor, src: NkiTensor) -> None:
    hbm = not (dst.on_chip and src.on_chip)
    moved = max(dst.size * dst.dtype.itemsize, src.size * src.dtype.itemsize)
    pieces = 1
    for one in (dst, src):
        count, length = layout.runs(one.shape, one.strides)
        if one.on_chip:  # partitions are not neighbours
            count, length = max(count, one.shape[0]), min(length, max(one.per_partition, 1))
        pieces = max(pieces, count)
    session.core().ledger.dma(what, moved, pieces, hbm=hbm)


def dma_copy(
    dst: Any,
    src: Any,
    priority: Any = None,
    oob_mode: Any = oob_mode.error,
    dge_mode: Any = dge_mode.unknown,
    engine: Any = engine.unknown,
    name: Any = None,
    dst_rmw_op: Any = None,
    unique_indices: Any = None,
    mask: Any = None,
    dtype: Any = None,
) -> None:
    """Copy as many elements as `src` has, in row-major order of both views, converting through float32.

    `dst_rmw_op` (NKI 0.2) combines with what is there instead of replacing it; later versions have `dma_compute`.
    """
    dst, src = _place("dma_copy", "dst", dst), _place("dma_copy", "src", src)
    if dst.size != src.size:
        fault(f"dma_copy of {src.size} elements {src.shape} into {dst.size} {dst.shape}")
    if dge_mode is _HWDGE and dst.dtype is not src.dtype and dst.dtype.itemsize != src.dtype.itemsize:
        fault(
            f"dma_copy with hardware descriptors from {src.dtype!r} to {dst.dtype!r}",
            do="they cannot convert; use .view",
        )
    combine = operator(dst_rmw_op, what="dst_rmw_op") if dst_rmw_op is not None else None
    _move(dst, src, oob_mode, combine)
    _charge("dma_copy", dst, src)


_HWDGE = dge_mode.hwdge


def dma_transpose(
    dst: Any,
    src: Any,
    axes: Any = None,
    priority: Any = None,
    dge_mode: Any = dge_mode.unknown,
    oob_mode: Any = oob_mode.error,
    name: Any = None,
    dtype: Any = None,
) -> None:
    """Transpose while copying: (1, 0), (2, 1, 0), and for four dimensions (3, 1, 2, 0)."""
    dst, src = _place("dma_transpose", "dst", dst), _place("dma_transpose", "src", src)
    if src.ndim not in _AXES:
        fault(f"dma_transpose of {src.ndim} dimensions", do="it takes 2, 3 or 4")
    order = _AXES[src.ndim]
    if axes is not None and tuple(int(one) for one in axes) != order:
        fault(f"dma_transpose with axes {tuple(axes)}", do=f"{src.ndim} dimensions go by {order}")
    if dst.dtype.itemsize != src.dtype.itemsize:
        fault(f"dma_transpose from {src.dtype!r} to {dst.dtype!r}", do="the types must be equal")
    wanted = tuple(src.shape[one] for one in order)
    if tuple(n for n in dst.shape if n != 1) != tuple(n for n in wanted if n != 1):
        fault(f"dma_transpose of {src.shape} by {order} gives {wanted}, dst is {dst.shape}")
    if dge_mode is _HWDGE:
        _check_hardware_transpose(src)
    if _rows(src):
        flat, keep = src.positions(oob_mode is _SKIP)
        values = np.broadcast_to(src._flat()[flat], src.shape).transpose(order).reshape(dst.shape)
        place = dst.array()
        mask = True if keep is None else np.broadcast_to(keep, src.shape).transpose(order).reshape(dst.shape)
        np.copyto(place, convert(values, dst.dtype), where=mask)
    else:
        dst.write(src.read().transpose(order).copy())
    ledger = session.core().ledger
    ledger.dma("dma_transpose", dst.size * dst.dtype.itemsize, dst.size * dst.dtype.itemsize // _LEAST_RUN + 1,
               hbm=not (dst.on_chip and src.on_chip))  # fmt: skip


_SKIP = oob_mode.skip


def _check_hardware_transpose(src: NkiTensor) -> None:
    if src.shape[-1] > 128:
        fault(f"dma_transpose with hardware descriptors of a last dimension of {src.shape[-1]}", do="at most 128")
    if src.dtype.itemsize != 2:
        fault(f"dma_transpose with hardware descriptors of {src.dtype!r}", do="types of 2 bytes")
    if src.ndim == 2 and src.shape[0] != 16:
        fault(f"dma_transpose with hardware descriptors of {src.shape[0]} rows", do="16 of them")
    if src.ndim > 2 and (src.shape[0] not in (1, 2, 4, 8, 16) or src.shape[0] * src.shape[-2] % 16):
        fault(
            f"dma_transpose with hardware descriptors of {src.shape}",
            do="1, 2, 4, 8 or 16 in front, 16 with the last but one",
        )


def dma_compute(
    dst: Any,
    srcs: Any,
    reduce_op: Any = None,
    scales: Any = None,
    unique_indices: bool = True,
    oob_mode: Any = oob_mode.error,
    name: Any = None,
    **legacy: Any,
) -> None:
    """Add up to 16 tensors in float32 on the way; with run-time rows, add to what `dst` has there."""
    checks.needs("dma_compute", nc_version.gen2)
    if isinstance(reduce_op, list | tuple):  # NKI 0.2 had scales in front of reduce_op
        reduce_op, scales = scales, reduce_op
    if reduce_op is None or operator(reduce_op, what="reduce_op").name != "add":
        fault(f"dma_compute: reduce_op={reduce_op!r}", do="it only adds")
    if scales is not None and any(float(one) != 1.0 for one in scales):
        fault(f"dma_compute: scales={scales!r}", do="all of them must be 1.0")
    dst = _place("dma_compute", "dst", dst)
    sources = [_place("dma_compute", f"srcs[{at}]", one) for at, one in enumerate(srcs)]
    if not 1 <= len(sources) <= 16 or any(one.size != dst.size for one in sources):
        fault(f"dma_compute of {[one.shape for one in sources]} into {dst.shape}", do="1 to 16 sources of equal size")
    indirect = [one for one in (dst, *sources) if _rows(one)]
    if indirect:
        if len(sources) != 2 or not unique_indices:
            fault("dma_compute with run-time rows", do="it takes two sources and unique indices")
        if _rows(dst):  # scatter: one source is the same rows of dst, the other is data
            data = next((one for one in sources if not _rows(one)), None)
        else:  # gather: one source is dst itself, the other the rows
            data = next((one for one in sources if _rows(one)), None)
        if data is None:
            fault("dma_compute: both sources have run-time rows")
        if _rows(dst):
            _check_unique(dst)
        _move(dst, data, oob_mode, OPERATORS["add"])
    else:
        total = sum(one.read32().reshape(dst.shape) for one in sources)
        dst.write(np.asarray(total))
    for one in sources:
        _charge("dma_compute", dst, one)


def _check_unique(view: NkiTensor) -> None:
    rows = view.dynamic.index.read().reshape(-1)[: view.shape[0]].astype(np.int64)
    inside = rows[(rows >= 0) & (rows < view.dynamic.limit)]
    if len(np.unique(inside)) != len(inside):
        fault("dma_compute: two rows have the same run-time index", do="only unique indices are supported")
