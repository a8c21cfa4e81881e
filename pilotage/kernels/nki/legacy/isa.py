"""Instructions in the style of NKI 0.1: they make the tile that they return.

A mask limits what is written, and lets operands reach out of range where it does not hold; what it leaves out of a new
tile is undefined. In a reduction the elements that a mask leaves out do not count.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pilotage.kernels.nki import isa, session
from pilotage.kernels.nki.dtypes import float32, resolve, uint32
from pilotage.kernels.nki.faults import fault
from pilotage.kernels.nki.isa import constants
from pilotage.kernels.nki.isa.constants import *  # noqa: F403
from pilotage.kernels.nki.isa.constants import engine, reduce_cmd
from pilotage.kernels.nki.isa.dma import dma_copy as _dma_copy
from pilotage.kernels.nki.isa.registers import register_alloc, register_load, register_move, register_store
from pilotage.kernels.nki.making import masked_copy, ndarray, read_masked, write_masked
from pilotage.kernels.nki.memory import MemoryRegion
from pilotage.kernels.nki.operators import operator
from pilotage.kernels.nki.tensor import NkiTensor

from pilotage.kernels.nki.hardware import nc_version  # isort: skip

_SBUF, _PSUM = MemoryRegion.sbuf, MemoryRegion.psum


def _new(shape: Any, dtype: Any, buffer: MemoryRegion = _SBUF) -> NkiTensor:
    return ndarray(tuple(shape), dtype, buffer)


def _inside(value: Any, mask: Any, fill: float = 0.0) -> Any:
    """Give an operand that is in range everywhere: itself, or a copy with `fill` where the mask does not hold."""
    if mask is None or not isinstance(value, NkiTensor):
        return value
    keep = np.broadcast_to(np.asarray(mask, bool), value.shape)
    out = _new(value.shape, value.dtype)
    out.write(np.where(keep, read_masked(value, keep).astype(np.float32), np.float32(fill)))
    return out


def _masked(out: NkiTensor, mask: Any) -> NkiTensor:
    """Undefine what a mask leaves out of a new tile."""
    if mask is None:
        return out
    fresh = _new(out.shape, out.dtype, out.buffer)
    write_masked(fresh, out.read(), np.broadcast_to(np.asarray(mask, bool), out.shape))
    return fresh


def nc_matmul(stationary: Any, moving: Any, *, mask: Any = None, dtype: Any = None, **options: Any) -> NkiTensor:
    """Return stationary.T @ moving in PSUM."""
    if mask is not None:
        fault("nc_matmul with a mask", do="mask the operands where they are loaded")
    columns = 2 if options.get("perf_mode") == constants.matmul_perf_mode.double_row else 1
    kind = dtype or (moving.dtype if options.get("is_transpose") else float32)
    out = _new((stationary.per_partition // columns, moving.per_partition // columns), kind, _PSUM)
    isa.nc_matmul(out, stationary, moving, **options)
    return out


def nc_transpose(data: Any, *, mask: Any = None, dtype: Any = None, engine: Any = engine.unknown) -> NkiTensor:
    """Return the transpose: in PSUM from the tensor engine, in SBUF from the vector engine."""
    data = _inside(data, mask)
    where = _SBUF if engine is constants.engine.vector else _PSUM
    out = _new((data.per_partition, data.shape[0]), dtype or data.dtype, where)
    isa.nc_transpose(out, data, engine=engine)
    return out


def activation(
    op: Any,
    data: Any,
    *,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Any = None,
    reduce_res: Any = None,
    reduce_cmd: Any = reduce_cmd.idle,
    mask: Any = None,
    dtype: Any = None,
) -> NkiTensor:
    """Return op(data * scale + bias)."""
    out = _new(data.shape, dtype or data.dtype)
    isa.activation(out, op, _inside(data, mask), bias, scale, reduce_op, reduce_res, reduce_cmd)
    return _masked(out, mask)


def activation_reduce(
    op: Any,
    data: Any,
    *,
    reduce_op: Any,
    reduce_res: Any,
    bias: Any = None,
    scale: Any = 1.0,
    mask: Any = None,
    dtype: Any = None,
) -> NkiTensor:
    """Return op(data * scale + bias) and reduce it."""
    return activation(op, data, bias=bias, scale=scale, reduce_op=reduce_op, reduce_res=reduce_res,
                      reduce_cmd=constants.reduce_cmd.reset_reduce, mask=mask, dtype=dtype)  # fmt: skip


def tensor_reduce(
    op: Any, data: Any, axis: Any, *, mask: Any = None, dtype: Any = None, negate: bool = False, keepdims: bool = False
) -> NkiTensor:
    """Return the reduction of the last free dimensions."""
    axes = tuple(axis) if isinstance(axis, list | tuple) else (axis,)
    axes = tuple(one + data.ndim if one < 0 else one for one in axes)
    found = operator(op)
    kept = tuple(1 if keepdims else 0 for _ in axes) if keepdims else ()
    shape = data.shape[: data.ndim - len(axes)] + kept
    out = _new(shape if len(shape) > 1 else (*shape, 1), dtype or data.dtype)
    isa.tensor_reduce(out, found, _inside(data, mask, float(found.identity or 0.0)), axes, negate)
    return out


def tensor_partition_reduce(op: Any, data: Any, *, mask: Any = None, dtype: Any = None) -> NkiTensor:
    """Return the reduction across partitions."""
    out = _new((1, *data.shape[1:]), dtype or data.dtype)
    isa.tensor_partition_reduce(out, op, _inside(data, mask))
    return out


def tensor_tensor(
    data1: Any, data2: Any, op: Any, *, dtype: Any = None, mask: Any = None, engine: Any = engine.unknown
) -> NkiTensor:
    """Return the combination of two tiles."""
    out = _new(data1.shape, dtype or _wider(data1, data2))
    isa.tensor_tensor(out, _inside(data1, mask), _inside(data2, mask), op, engine)
    return _masked(out, mask)


def _wider(*tiles: Any) -> Any:
    return max((one.dtype for one in tiles), key=lambda kind: (kind.is_float, kind.itemsize))


def tensor_tensor_scan(
    data0: Any, data1: Any, initial: Any, op0: Any, op1: Any, reverse0: bool = False, reverse1: bool = False, *,
    dtype: Any = None, mask: Any = None,
) -> NkiTensor:  # fmt: skip
    """Return the scan of two tiles."""
    out = _new(data0.shape, dtype or _wider(data0, data1))
    isa.tensor_tensor_scan(out, _inside(data0, mask), _inside(data1, mask), initial, op0, op1, reverse0, reverse1)
    return _masked(out, mask)


def scalar_tensor_tensor(
    *, data: Any, op0: Any, operand0: Any, op1: Any, operand1: Any, reverse0: bool = False, reverse1: bool = False,
    dtype: Any = None, mask: Any = None,
) -> NkiTensor:  # fmt: skip
    """Return (data op0 operand0) op1 operand1."""
    out = _new(data.shape, dtype or _wider(data, operand1))
    isa.scalar_tensor_tensor(out, _inside(data, mask), op0, operand0, op1, _inside(operand1, mask), reverse0, reverse1)
    return _masked(out, mask)


def tensor_scalar(
    data: Any, op0: Any, operand0: Any, reverse0: bool = False, op1: Any = None, operand1: Any = None,
    reverse1: bool = False, *, dtype: Any = None, mask: Any = None, engine: Any = engine.unknown,
) -> NkiTensor:  # fmt: skip
    """Return (data op0 operand0) op1 operand1."""
    out = _new(data.shape, dtype or data.dtype)
    isa.tensor_scalar(out, _inside(data, mask), op0, operand0, reverse0, op1, operand1, reverse1, engine)
    return _masked(out, mask)


def tensor_scalar_reduce(
    *,
    data: Any,
    op0: Any,
    operand0: Any,
    reduce_op: Any,
    reduce_res: Any,
    reverse0: bool = False,
    dtype: Any = None,
    mask: Any = None,
) -> NkiTensor:
    """Return data op0 operand0, and reduce it."""
    if mask is not None:
        fault("tensor_scalar_reduce with a mask", do="mask its input where it is made")
    out = _new(data.shape, dtype or data.dtype)
    isa.tensor_scalar_reduce(out, data, op0, operand0, reduce_op, reduce_res, reverse0)
    return out


def tensor_copy(src: Any, *, mask: Any = None, dtype: Any = None, engine: Any = engine.unknown) -> NkiTensor:
    """Return a copy in SBUF."""
    out = _new(src.shape, dtype or src.dtype)
    isa.tensor_copy(out, _inside(src, mask), engine)
    return _masked(out, mask)


def tensor_copy_predicated(
    *, src: Any, dst: Any, predicate: Any, mask: Any = None, dtype: Any = None, reverse_pred: bool = False
) -> None:
    """Copy into `dst` where the predicate is nonzero."""
    isa.tensor_copy_predicated(dst, src, predicate, reverse_pred)


def reciprocal(data: Any, *, dtype: Any = None, mask: Any = None) -> NkiTensor:
    """Return 1 / data."""
    out = _new(data.shape, dtype or data.dtype)
    isa.reciprocal(out, _inside(data, mask, 1.0))
    return _masked(out, mask)


def iota(expr: Any, dtype: Any, *, mask: Any = None) -> NkiTensor:
    """Return the values of an index expression."""
    values = np.asarray(expr)
    out = _new(values.shape, dtype)
    out.write(values)
    session.core().ledger.compute("gpsimd", "iota", out.per_partition)
    return _masked(out, mask)


def dropout(data: Any, prob: Any, *, mask: Any = None, dtype: Any = None) -> NkiTensor:
    """Return data with elements replaced by zero."""
    out = _new(data.shape, dtype or data.dtype)
    isa.dropout(out, _inside(data, mask), prob)
    return _masked(out, mask)


def affine_select(
    pred: Any, on_true_tile: Any, on_false_value: Any, *, mask: Any = None, dtype: Any = None
) -> NkiTensor:
    """Return the elements where an index predicate holds, a constant elsewhere."""
    values = _inside(on_true_tile, mask).read32()
    out = _new(on_true_tile.shape, dtype or on_true_tile.dtype)
    out.write(np.where(np.broadcast_to(np.asarray(pred, bool), out.shape), values, np.float32(on_false_value)))
    session.core().ledger.compute("gpsimd", "affine_select", out.per_partition)
    return _masked(out, mask)


def range_select(*, on_true_tile: Any, dtype: Any = None, mask: Any = None, **options: Any) -> NkiTensor:
    """Return the elements whose position lies between two bounds."""
    out = _new(on_true_tile.shape, dtype or on_true_tile.dtype)
    isa.range_select(out, _inside(on_true_tile, mask), **options)
    return _masked(out, mask)


def select_reduce(
    *, dst: Any, predicate: Any, on_true: Any, on_false: Any, mask: Any = None, dtype: Any = None, **options: Any
) -> None:
    """Choose between two values, into `dst`."""
    isa.select_reduce(dst, predicate, on_true, on_false, **options)


def sequence_bounds(*, segment_ids: Any, dtype: Any = None) -> NkiTensor:
    """Return where segments start and end."""
    out = _new((1, 2, segment_ids.per_partition), dtype or segment_ids.dtype)
    isa.sequence_bounds(out, segment_ids)
    return out


def memset(shape: Any, value: Any, dtype: Any, *, mask: Any = None, engine: Any = engine.unknown) -> NkiTensor:
    """Return a tile full of one value."""
    out = _new(shape, dtype)
    isa.memset(out, value, engine)
    return _masked(out, mask)


def bn_stats(data: Any, *, mask: Any = None, dtype: Any = None) -> NkiTensor:
    """Return the six statistics of each partition."""
    if mask is not None:
        fault("bn_stats with a mask", do="slice the tile")
    out = _new((data.shape[0], 6), dtype or float32)
    isa.bn_stats(out, data)
    return out


def bn_aggr(data: Any, *, mask: Any = None, dtype: Any = None) -> NkiTensor:
    """Return mean and variance of each partition."""
    if mask is not None:
        fault("bn_aggr with a mask", do="slice the tile")
    out = _new((data.shape[0], 2), dtype or data.dtype)
    isa.bn_aggr(out, data)
    return out


def local_gather(
    src_buffer: Any, index: Any, num_elem_per_idx: int = 1, num_valid_indices: int | None = None, *, mask: Any = None
) -> NkiTensor:
    """Return what indices select within every 16 partitions."""
    count = index.per_partition * 16 if num_valid_indices is None else num_valid_indices
    out = _new((src_buffer.shape[0], count * num_elem_per_idx), src_buffer.dtype)
    isa.local_gather(out, src_buffer, index, num_elem_per_idx, num_valid_indices)
    return out


def dma_copy(*, dst: Any, src: Any, mask: Any = None, **options: Any) -> None:
    """Copy by DMA."""
    if mask is None:
        _dma_copy(dst, src, **options)
        return
    masked_copy(dst, src, mask)
    session.core().ledger.dma(
        "dma_copy", dst.size * dst.dtype.itemsize, dst.shape[0], hbm=not (dst.on_chip and src.on_chip)
    )


def dma_transpose(src: Any, *, axes: Any = None, mask: Any = None, dtype: Any = None, **options: Any) -> NkiTensor:
    """Return the transpose by DMA, in SBUF."""
    order = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}.get(src.ndim, ())
    out = _new(tuple(src.shape[one] for one in order) or src.shape, dtype or src.dtype)
    isa.dma_transpose(out, src, axes=axes, **options)
    return out


def max8(*, src: Any, mask: Any = None, dtype: Any = None) -> NkiTensor:
    """Return the 8 largest values of each partition."""
    out = _new((src.shape[0], 8), dtype or src.dtype)
    isa.max8(out, _inside(src, mask, -np.inf))
    return out


def nc_find_index8(*, data: Any, vals: Any, mask: Any = None, dtype: Any = None) -> NkiTensor:
    """Return where 8 values stand."""
    out = _new((data.shape[0], 8), dtype or uint32)
    isa.nc_find_index8(out, data, vals)
    return out


def nc_match_replace8(
    *, data: Any, vals: Any, imm: float, dst_idx: Any = None, mask: Any = None, dtype: Any = None
) -> NkiTensor:
    """Return data with the first occurrences of 8 values replaced."""
    out = _new(data.shape, resolve(dtype or data.dtype))
    isa.nc_match_replace8(out, data, vals, imm, dst_idx)
    return out


def nc_stream_shuffle(src: Any, dst: Any, shuffle_mask: Any, *, dtype: Any = None, mask: Any = None) -> None:
    """Copy between the partitions of each quadrant, into `dst`."""
    isa.nc_stream_shuffle(dst, src, shuffle_mask)


__all__ = [name for name in dir() if not name.startswith("_") and name not in ("annotations", "Any", "np")]
_KEPT = (nc_version, register_alloc, register_load, register_move, register_store)
