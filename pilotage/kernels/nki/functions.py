"""The functions of `nki.language` that compute: they make the tile that they return."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np

from pilotage.kernels.nki import session
from pilotage.kernels.nki.dtypes import DType, float32, resolve
from pilotage.kernels.nki.faults import fault
from pilotage.kernels.nki.hardware import PARTITIONS
from pilotage.kernels.nki.isa import tensor as _tensor_engine
from pilotage.kernels.nki.making import ndarray, psum, read_masked, sbuf, write_masked
from pilotage.kernels.nki.operators import OPERATORS, Op, quiet
from pilotage.kernels.nki.tensor import NkiTensor


def values_of(value: Any) -> Any:
    """Read an operand in float32: a tile, or a constant."""
    if isinstance(value, NkiTensor):
        return value.read32()
    return np.float32(value)


def apply(op: Op, *operands: Any, dtype: Any = None, mask: Any = None, **hints: Any) -> NkiTensor:
    """Apply an operator to tiles and constants that broadcast against each other, into a new SBUF tile."""
    if len(operands) != op.arity:
        fault(f"{op!r} takes {op.arity} operands, and got {len(operands)}")
    tiles = [one for one in operands if isinstance(one, NkiTensor)]
    if not tiles:
        fault(f"{op!r} of no tile", do="use Python's arithmetic on numbers")
    for one in tiles:
        if not one.on_chip:
            fault(f"{op!r} of {one!r}", do="load it into SBUF first")
    keep = None if mask is None else np.asarray(mask, bool)

    def ready(one: Any) -> Any:
        if not isinstance(one, NkiTensor):
            return one if op.bitvec else np.float32(one)
        raw = one.read() if keep is None else read_masked(one, np.broadcast_to(keep, one.shape))
        return raw if op.bitvec else raw.astype(np.float32)

    with quiet():
        try:
            values = np.asarray(op.function(*[ready(one) for one in operands]))
        except ValueError:
            fault(f"{op!r} of {' and '.join(str(one.shape) for one in tiles)}, which do not broadcast")
    kind = resolve(dtype) if dtype is not None else _common(tiles)
    out = ndarray(values.shape, kind)
    if keep is None:
        out.write(values)
    else:
        write_masked(out, values, np.broadcast_to(keep, values.shape))
    engine = "scalar" if op.activation and not op.alu else "vector"
    session.core().ledger.compute(engine, op.name, out.per_partition * len(tiles))
    return out


def _common(tiles: list[NkiTensor]) -> DType:
    """Give the widest type among tiles; floats before integers."""
    return builtins.max((one.dtype for one in tiles), key=lambda kind: (kind.is_float, kind.itemsize))


def _reduce(op: Op, x: NkiTensor, axis: Any, dtype: Any, keepdims: bool, mask: Any, mean: bool = False) -> NkiTensor:
    axes = tuple(int(one) for one in (axis if isinstance(axis, tuple | list) else (axis,)))
    axes = tuple(sorted(one + x.ndim if one < 0 else one for one in axes))
    if 0 in axes or axes != tuple(range(x.ndim - len(axes), x.ndim)):
        fault(f"a reduction over {axes} of {x.shape}", do="reduce the last free dimensions, up to the very last")
    values = x.read32() if mask is None else _masked_values(x, mask, op)
    with quiet():
        out = np.asarray(op.reduction(values, axis=axes))  # type: ignore[misc]
    if mean:
        out = out / np.float32(np.prod([x.shape[one] for one in axes]))
    shape = tuple(1 if at in axes else n for at, n in enumerate(x.shape)) if keepdims else out.shape
    shape = (*shape, 1) if len(shape) < 2 else shape
    result = ndarray(shape, dtype or x.dtype)
    result.write(out.reshape(shape))
    session.core().ledger.compute("vector", "tensor_reduce", x.per_partition)
    return result


def _masked_values(x: NkiTensor, mask: Any, op: Op) -> Any:
    keep = np.broadcast_to(np.asarray(mask, bool), x.shape)
    return np.where(keep, read_masked(x, keep).astype(np.float32), np.float32(op.identity))


def sum(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False, mask: Any = None) -> NkiTensor:
    """Add up the last dimensions."""
    return _reduce(OPERATORS["add"], x, axis, dtype, keepdims, mask)


def max(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False, mask: Any = None) -> NkiTensor:
    """Find the largest over the last dimensions."""
    return _reduce(OPERATORS["maximum"], x, axis, dtype, keepdims, mask)


def min(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False, mask: Any = None) -> NkiTensor:
    """Find the smallest over the last dimensions."""
    return _reduce(OPERATORS["minimum"], x, axis, dtype, keepdims, mask)


def prod(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False, mask: Any = None) -> NkiTensor:
    """Multiply the last dimensions together."""
    return _reduce(OPERATORS["multiply"], x, axis, dtype, keepdims, mask)


def mean(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Average the last dimensions."""
    return _reduce(OPERATORS["add"], x, axis, dtype, keepdims, None, mean=True)


def all(x: NkiTensor, axis: Any, dtype: Any = None) -> NkiTensor:
    """Tell whether everything over the last dimensions is nonzero."""
    return _reduce(OPERATORS["logical_and"], x, axis, dtype, False, None)


def var(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Compute the variance over the last dimensions."""
    centre = mean(x, axis, float32, True)
    spread = apply(OPERATORS["square"], apply(OPERATORS["subtract"], x, centre, dtype=float32))
    return mean(spread, axis, dtype or x.dtype, keepdims)


def softmax(x: NkiTensor, axis: Any = -1, dtype: Any = None) -> NkiTensor:
    """Compute the softmax over the last dimensions."""
    powers = apply(OPERATORS["exp"], apply(OPERATORS["subtract"], x, max(x, axis, float32, True), dtype=float32))
    return apply(OPERATORS["divide"], powers, sum(powers, axis, float32, True), dtype=dtype or x.dtype)


def rms_norm(
    x: NkiTensor, w: NkiTensor, axis: Any, n: int, epsilon: float = 1e-6, dtype: Any = None, compute_dtype: Any = None
) -> NkiTensor:
    """Divide by the root mean square over `axis` and multiply by the weight."""
    inner = compute_dtype or float32
    squares = sum(apply(OPERATORS["square"], x, dtype=inner), axis, inner, True)
    scale = apply(OPERATORS["rsqrt"], apply(OPERATORS["add"], apply(OPERATORS["multiply"], squares, 1.0 / n), epsilon))
    normed = apply(OPERATORS["multiply"], x, scale, dtype=inner)
    return apply(OPERATORS["multiply"], normed, w, dtype=dtype or x.dtype)


def where(condition: Any, x: Any, y: Any, dtype: Any = None, mask: Any = None) -> NkiTensor:
    """Choose elements of `x` where the condition is nonzero, else of `y`."""
    tiles = [one for one in (x, y) if isinstance(one, NkiTensor)]
    values = np.where(values_of(condition) != 0, values_of(x), values_of(y))
    out = ndarray(values.shape, dtype or (_common(tiles) if tiles else float32))
    out.write(values)
    session.core().ledger.compute("vector", "where", 2 * out.per_partition)
    return out


def dropout(x: NkiTensor, rate: Any, dtype: Any = None) -> NkiTensor:
    """Replace elements by zero with probability `rate`."""
    from pilotage.kernels.nki.isa.random import dropout as instruction

    out = ndarray(x.shape, dtype or x.dtype)
    instruction(out, x, rate)
    return out


def expand_dims(x: NkiTensor, axis: int) -> NkiTensor:
    """Insert a dimension of one element."""
    return x.expand_dim(axis)


def broadcast_to(x: NkiTensor, shape: Any, dtype: Any = None, **hints: Any) -> NkiTensor:
    """Repeat a tile along its dimensions of one element."""
    wanted = tuple(int(one) for one in shape)
    if x.shape == wanted and (dtype is None or x.dtype == resolve(dtype)):
        return x
    out = ndarray(wanted, dtype or x.dtype)
    out.write(np.broadcast_to(x.read(), wanted))
    session.core().ledger.compute("vector", "broadcast_to", out.per_partition)
    return out


def transpose(x: NkiTensor, dtype: Any = None, mask: Any = None) -> NkiTensor:
    """Swap partitions and free elements, into PSUM."""
    out = ndarray((x.per_partition, x.shape[0]), dtype or x.dtype, psum)
    flat = x.read().reshape(x.shape[0], -1)
    if x.shape[0] > PARTITIONS or x.per_partition > PARTITIONS:
        fault(f"a transpose of {x.shape}", do="tile it to at most 128 by 128")
    out.write(flat.T, _tensor_engine.BY_MATMUL)
    session.core().ledger.matmul("nc_transpose", float(np.maximum(x.shape[0], _tensor_engine.MIN_CYCLES)), 0)
    return out


def matmul(x: NkiTensor, y: NkiTensor, transpose_x: bool = False, mask: Any = None) -> NkiTensor:
    """Compute x @ y (x.T @ y with `transpose_x`) into PSUM; without it, x is transposed first."""
    if session.core().launch.legacy:  # the tracer of NKI 0.1 moves operands to SBUF by itself
        x, y = (_in_sbuf(one) for one in (x, y))
    stationary = x
    if not transpose_x:
        stationary = ndarray((x.per_partition, x.shape[0]), x.dtype)
        flipped = transpose(x)
        stationary.write(flipped.read())
        session.core().ledger.compute("vector", "tensor_copy", stationary.per_partition)
    out = ndarray((stationary.per_partition, y.per_partition), float32, psum)
    _tensor_engine.nc_matmul(out, stationary, y)
    return out


def _in_sbuf(x: NkiTensor) -> NkiTensor:
    if x.buffer is sbuf:
        return x
    out = ndarray(x.shape, x.dtype)
    out.write(x.read())
    session.core().ledger.compute("vector", "tensor_copy", out.per_partition)
    return out


def gather_flattened(
    data: NkiTensor, indices: NkiTensor, axis: int = 0, dtype: Any = None, mask: Any = None
) -> NkiTensor:
    """Gather within each partition by flattened position."""
    flat = data.read().reshape(data.shape[0], -1)
    at = indices.read().reshape(indices.shape[0], -1).astype(np.int64)
    if at.size and (at.min() < 0 or at.max() >= flat.shape[1]):
        fault(f"gather_flattened: an index is out of range for {flat.shape[1]} elements a partition")
    out = ndarray(indices.shape, dtype or data.dtype)
    out.write(np.take_along_axis(flat, at, 1).reshape(out.shape))
    session.core().ledger.compute("gpsimd", "nc_n_gather", out.per_partition)
    return out
