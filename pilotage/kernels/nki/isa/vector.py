"""Instructions of the vector engine (some of them also run on the scalar or the GpSimd engine)."""

from __future__ import annotations

from typing import Any

import numpy as np

from pilotage.kernels.nki import session
from pilotage.kernels.nki.dtypes import Array
from pilotage.kernels.nki.faults import fault
from pilotage.kernels.nki.hardware import nc_version
from pilotage.kernels.nki.isa import checks
from pilotage.kernels.nki.isa.accumulators import accumulate
from pilotage.kernels.nki.isa.constants import engine, reduce_cmd
from pilotage.kernels.nki.memory import MemoryRegion
from pilotage.kernels.nki.operators import OPERATORS, Op, alu, operator, quiet
from pilotage.kernels.nki.tensor import NkiTensor

_ANY = (engine.vector, engine.scalar, engine.gpsimd)
_HALF = ("bfloat16", "float16")


def _fast(*tiles: NkiTensor) -> float:
    """Give the speed-up of copies and tensor-scalar instructions on narrow floats (Trainium 2 guide)."""
    if any(str(one.dtype) not in _HALF for one in tiles):
        return 1.0
    in_sbuf = sum(one.buffer is MemoryRegion.sbuf for one in tiles)
    dense = all(one.strides[-1] == 1 or one.shape[-1] == 1 for one in tiles)
    if in_sbuf == len(tiles):
        return 4.0 if dense else 2.0
    return 2.0 if dense and in_sbuf else 1.0


def _legacy() -> bool:
    return session.core().launch.legacy


def tensor_copy(dst: Any, src: Any, engine: Any = engine.unknown, dtype: Any = None, name: Any = None) -> None:
    """Copy a tile on chip; equal types keep every bit, others go through float32."""
    dst, src = checks.tile("tensor_copy", "dst", dst), checks.tile("tensor_copy", "src", src)
    checks.same_tile("tensor_copy", dst, src=src)
    chosen = checks.engine_of("tensor_copy", engine, _ANY, _ANY[0])
    checks.no_gpsimd_in_psum("tensor_copy", chosen, dst, src)
    values = src.read()
    if src.dtype.is_integer != dst.dtype.is_integer:
        values = values.astype(np.float32)
    dst.write(checks.shaped(values, dst).copy() if src.storage is dst.storage else checks.shaped(values, dst))
    session.core().ledger.compute(chosen.name, "tensor_copy", dst.per_partition, _fast(dst, src))


def memset(dst: Any, value: Any, engine: Any = engine.unknown, dtype: Any = None, name: Any = None) -> None:
    """Fill a tile with a constant; an integer tile takes an integer."""
    dst = checks.tile("memset", "dst", dst)
    chosen = checks.engine_of("memset", engine, (_ANY[0], _ANY[2]), _ANY[0])
    checks.no_gpsimd_in_psum("memset", chosen, dst)
    if dst.dtype.kind == "packed" and value != 0:
        fault(f"memset of {dst.dtype!r} with {value!r}", do="only 0 fits a packed type; load other values by DMA")
    if dst.dtype.is_integer and not float(value).is_integer():
        fault(f"memset of {dst.dtype!r} with {value!r}", do="give an integer")
    kept = np.int64(value) if dst.dtype.is_integer or dst.dtype.kind == "packed" else np.float32(value)
    dst.write(np.broadcast_to(kept, dst.shape))
    session.core().ledger.compute(chosen.name, "memset", dst.per_partition, _fast(dst))


def _operand_bits(instruction: str, name: str, value: Any, like: NkiTensor) -> Any:
    if isinstance(value, NkiTensor):
        checks.tile(instruction, name, value)
        return value.read().reshape((like.shape[0],) + (1,) * (like.ndim - 1))
    return like.dtype.held.type(int(value) & ((1 << (8 * like.dtype.itemsize)) - 1)) if value is not None else None


def _exact_integers(tiles: list[NkiTensor], *constants: Any) -> bool:
    """Tell whether 32-bit integers meet only integers: then the arithmetic is exact instead of float32."""
    names = ("int32", "uint32")
    return all(str(one.dtype) in names for one in tiles) and all(
        value is None
        or (isinstance(value, NkiTensor) and str(value.dtype) in names)
        or (not isinstance(value, NkiTensor) and float(value).is_integer())
        for value in constants
    )


def combine(op: Op, x: Any, y: Any, reverse: bool = False) -> Array:
    """Apply an operator to values that are ready for it."""
    with quiet():
        if op.arity == 1:
            return op.function(x)  # type: ignore[no-any-return]
        return op.function(y, x) if reverse else op.function(x, y)  # type: ignore[no-any-return]


def tensor_tensor(
    dst: Any, data1: Any, data2: Any, op: Any, engine: Any = engine.unknown, dtype: Any = None, name: Any = None
) -> None:
    """Combine two tiles element by element."""
    dst = checks.tile("tensor_tensor", "dst", dst)
    data1, data2 = checks.tile("tensor_tensor", "data1", data1), checks.tile("tensor_tensor", "data2", data2)
    checks.same_tile("tensor_tensor", dst, data1=data1, data2=data2)
    checks.not_both_psum("tensor_tensor", data1=data1, data2=data2)
    found = alu(op, legacy=_legacy())
    if found.arity != 2:
        fault(f"tensor_tensor: {found!r} takes one operand", do="use tensor_scalar or activation")
    exact = _exact_integers([dst, data1, data2])
    touches_psum = any(one.buffer is MemoryRegion.psum for one in (dst, data1, data2))
    on_gpsimd = found.name == "power" or (exact and not found.bitvec and not touches_psum)
    chosen = checks.engine_of("tensor_tensor", engine, (_ANY[0], _ANY[2]), _ANY[2] if on_gpsimd else _ANY[0])
    checks.no_gpsimd_in_psum("tensor_tensor", chosen, dst, data1, data2)
    if found.bitvec:
        _check_bitvec("tensor_tensor", dst, data1, data2)
        result = combine(found, checks.shaped(data1.read(), dst), checks.shaped(data2.read(), dst))
    elif exact and chosen is _ANY[2]:
        wide = combine(found, data1.read().astype(np.int64), data2.read().astype(np.int64).reshape(data1.shape))
        result = wide.reshape(dst.shape)
    else:
        result = combine(found, checks.shaped(data1.read32(), dst), checks.shaped(data2.read32(), dst))
    dst.write(result)
    narrow = all(str(one.dtype) in _HALF for one in (dst, data1, data2)) and not touches_psum
    session.core().ledger.compute(chosen.name, "tensor_tensor", 2 * dst.per_partition, 2.0 if narrow else 1.0)


def _check_bitvec(instruction: str, *tiles: NkiTensor) -> None:
    for one in tiles:
        if not one.dtype.is_integer:
            fault(f"{instruction}: a bitwise operator on {one.dtype!r}", do="bitwise operators take integers")


def two_steps(
    instruction: str, dst: NkiTensor, data: NkiTensor, steps: list[tuple[Op, Any, bool]], names: list[str]
) -> Array:
    """Compute (data op0 operand0) op1 operand1 and give it in the shape of `dst`."""
    kinds = {op.bitvec for op, _, _ in steps}
    if len(kinds) > 1:
        fault(f"{instruction}: a bitwise and an arithmetic operator in one instruction", do="use two instructions")
    operands = [operand for op, operand, _ in steps if op.arity == 2]
    if kinds == {True}:
        _check_bitvec(instruction, dst, data)
        values = data.read()
        for (op, operand, reverse), label in zip(steps, names, strict=False):
            bits = _operand_bits(instruction, label, operand, data)
            values = combine(op, values, bits, reverse).astype(values.dtype)
        return checks.shaped(values, dst)
    if _exact_integers([dst, data], *operands) and all(op.name in _INTEGER_OPS for op, _, _ in steps):
        values = data.read().astype(np.int64)
        for (op, operand, reverse), label in zip(steps, names, strict=False):
            whole = operand
            if isinstance(operand, NkiTensor):
                checks.vector_or_scalar(instruction, label, operand, data)
                whole = operand.read().astype(np.int64).reshape((data.shape[0],) + (1,) * (data.ndim - 1))
            elif op.arity == 2:
                whole = np.int64(operand)
            values = combine(op, values, whole, reverse)
        return checks.shaped(values, dst)
    values = data.read32()
    for (op, operand, reverse), label in zip(steps, names, strict=False):
        ready = checks.vector_or_scalar(instruction, label, operand, data) if op.arity == 2 else None
        values = combine(op, values, ready, reverse)
    return checks.shaped(values, dst)


_INTEGER_OPS = ("add", "subtract", "multiply", "maximum", "minimum", "bypass", "abs")


def _steps(
    instruction: str, op0: Any, operand0: Any, reverse0: bool, op1: Any, operand1: Any, reverse1: bool
) -> list[tuple[Op, Any, bool]]:
    out = []
    for which, op, operand, reverse in (("op0", op0, operand0, reverse0), ("op1", op1, operand1, reverse1)):
        if op is None:
            continue
        found = alu(op, what=which, legacy=_legacy())
        if found.arity == 2 and operand is None:
            fault(f"{instruction}: {which}={found!r} has no operand")
        out.append((found, operand, bool(reverse)))
    return out


def tensor_scalar(
    dst: Any,
    data: Any,
    op0: Any,
    operand0: Any = None,
    reverse0: bool = False,
    op1: Any = None,
    operand1: Any = None,
    reverse1: bool = False,
    engine: Any = engine.unknown,
    dtype: Any = None,
    name: Any = None,
) -> None:
    """Combine a tile with one or two operands that are constants or one value a partition."""
    dst, data = checks.tile("tensor_scalar", "dst", dst), checks.tile("tensor_scalar", "data", data)
    checks.same_tile("tensor_scalar", dst, data=data)
    steps = _steps("tensor_scalar", op0, operand0, reverse0, op1, operand1, reverse1)
    on_gpsimd = any(op.name in ("rsqrt", "power") for op, _, _ in steps)
    touches_psum = MemoryRegion.psum in (dst.buffer, data.buffer)
    chosen = checks.engine_of("tensor_scalar", engine, _ANY, _ANY[2] if on_gpsimd and not touches_psum else _ANY[0])
    checks.no_gpsimd_in_psum("tensor_scalar", chosen, dst, data)
    if chosen is _ANY[1] and not _legacy():
        ops = tuple(op.name for op, _, _ in steps)
        if ops not in (("multiply", "add"), ("multiply",), ("add",)):
            fault(f"tensor_scalar with {ops} on the scalar engine", do="it has multiply, add, and multiply then add")
    dst.write(two_steps("tensor_scalar", dst, data, steps, ["operand0", "operand1"]))
    session.core().ledger.compute(chosen.name, "tensor_scalar", dst.per_partition, _fast(dst, data))


def scalar_tensor_tensor(
    dst: Any,
    data: Any,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
    dtype: Any = None,
    name: Any = None,
    engine: Any = engine.unknown,
) -> None:
    """Compute (data op0 operand0) op1 operand1, where operand0 is one value a partition and operand1 a tile."""
    what = "scalar_tensor_tensor"
    dst, data, operand1 = (
        checks.tile(what, label, one) for label, one in (("dst", dst), ("data", data), ("operand1", operand1))
    )
    checks.same_tile(what, dst, data=data, operand1=operand1)
    checks.not_both_psum(what, data=data, operand1=operand1)
    first, second = alu(op0, what="op0", legacy=_legacy()), alu(op1, what="op1", legacy=_legacy())
    if first.bitvec or second.bitvec:
        fault(f"{what}: bitwise operators are not possible here", do="use tensor_scalar and tensor_tensor")
    ready = checks.vector_or_scalar(what, "operand0", operand0, data) if first.arity == 2 else None
    middle = checks.shaped(combine(first, data.read32(), ready, reverse0), dst)
    dst.write(combine(second, middle, checks.shaped(operand1.read32(), dst), reverse1))
    session.core().ledger.compute("vector", what, 2 * dst.per_partition)


def tensor_reduce(
    dst: Any,
    op: Any,
    data: Any,
    axis: Any,
    negate: bool = False,
    keepdims: bool = False,
    dtype: Any = None,
    name: Any = None,
) -> None:
    """Reduce the last free dimensions of a tile."""
    dst, data = checks.tile("tensor_reduce", "dst", dst), checks.tile("tensor_reduce", "data", data)
    axes = tuple(int(one) for one in (axis if isinstance(axis, list | tuple) else (axis,)))
    axes = tuple(sorted(one + data.ndim if one < 0 else one for one in axes))
    if 0 in axes:
        fault("tensor_reduce cannot reduce the partition dimension", do="transpose first, or multiply by ones")
    if axes != tuple(range(data.ndim - len(axes), data.ndim)):
        fault(f"tensor_reduce over {axes} of {data.shape}", do="reduce the last dimensions, up to the very last")
    dst.write(reduced("tensor_reduce", operator(op), data, axes, negate, dst))
    session.core().ledger.compute("vector", "tensor_reduce", data.per_partition)


def reduced(instruction: str, op: Op, data: NkiTensor, axes: tuple[int, ...], negate: bool, dst: NkiTensor) -> Array:
    """Reduce some dimensions and check that what is left fits `dst`."""
    if op.reduction is None:
        fault(f"{instruction}: {op!r} cannot reduce")
    if op.bitvec:
        _check_bitvec(instruction, dst, data)
        if negate:
            fault(f"{instruction}: negate is for arithmetic operators")
        values = data.read()
        for axis in reversed(axes):
            values = op.reduction(values, axis=axis)
    else:
        with quiet():
            values = np.asarray(op.reduction(data.read32(), axis=axes))
        values = -values if negate else values
    if values.size != dst.size or data.shape[0] != dst.shape[0]:
        fault(f"{instruction}: {data.shape} reduced over {axes} does not fit dst {dst.shape}")
    return values.reshape(dst.shape)


def tensor_scalar_reduce(
    dst: Any,
    data: Any,
    op0: Any,
    operand0: Any,
    reduce_op: Any,
    reduce_res: Any = None,
    reverse0: bool = False,
    reduce_cmd: Any = reduce_cmd.reset_reduce,
    reduce_init: Any = None,
    reduce_res_negate: bool = False,
    dtype: Any = None,
    name: Any = None,
) -> None:
    """Compute data op0 operand0 and reduce the result over all free dimensions."""
    what = "tensor_scalar_reduce"
    dst, data = checks.tile(what, "dst", dst), checks.tile(what, "data", data)
    checks.same_tile(what, dst, data=data)
    steps = _steps(what, op0, operand0, reverse0, None, None, False)
    if steps[0][0].bitvec:
        fault(f"{what}: bitwise operators are not possible here")
    values = two_steps(what, dst, data, steps, ["operand0"])
    accumulate(what, session.core().vector_registers, values, operator(reduce_op, what="reduce_op"), reduce_cmd,
               reduce_res, reduce_init, negate=reduce_res_negate)  # fmt: skip
    dst.write(values)
    session.core().ledger.compute("vector", what, dst.per_partition)


def reciprocal(dst: Any, data: Any, dtype: Any = None, name: Any = None) -> None:
    """Compute 1 / data."""
    dst, data = checks.tile("reciprocal", "dst", dst), checks.tile("reciprocal", "data", data)
    checks.same_tile("reciprocal", dst, data=data)
    with quiet():
        dst.write(checks.shaped(np.float32(1) / data.read32(), dst))
    session.core().ledger.compute("vector", "reciprocal", 8 * dst.per_partition)


def exponential(
    dst: Any,
    src: Any,
    max_value: Any = 0.0,
    reduce_res: Any = None,
    reduce_cmd: Any = reduce_cmd.idle,
    reduce_init: Any = 0.0,
    name: Any = None,
) -> None:
    """Compute exp(src - max_value), and the sum of the results if asked."""
    checks.needs("exponential", nc_version.gen4)
    dst, src = checks.tile("exponential", "dst", dst), checks.tile("exponential", "src", src)
    checks.same_tile("exponential", dst, src=src)
    with quiet():
        values = np.exp(src.read32() - checks.vector_or_scalar("exponential", "max_value", max_value, src))
    accumulate("exponential", session.core().vector_registers, values, OPERATORS["add"], reduce_cmd, reduce_res,
               reduce_init)  # fmt: skip
    dst.write(checks.shaped(values, dst))
    session.core().ledger.compute("vector", "exponential", dst.per_partition)


def nc_stream_shuffle(dst: Any, src: Any, shuffle_mask: Any, dtype: Any = None, name: Any = None) -> None:
    """Copy within each quadrant of 32 partitions: partition i from partition shuffle_mask[i] (255: leave it)."""
    what = "nc_stream_shuffle"
    dst, src = checks.tile(what, "dst", dst), checks.tile(what, "src", src)
    mask = [int(one) for one in shuffle_mask]
    if len(mask) != 32 or any(not (0 <= one < 32 or one == 255) for one in mask):
        fault(f"{what}: shuffle_mask has 32 entries from 0 to 31, or 255")
    if dst.dtype != src.dtype or dst.per_partition != src.per_partition:
        fault(f"{what}: dst {dst!r} and src {src!r} must agree in type and in elements a partition")
    values = src.read().reshape(src.shape[0], -1).copy()
    target = dst.read().reshape(dst.shape[0], -1).copy()
    for row in range(dst.shape[0]):
        source = mask[row % 32]
        if source == 255:
            continue
        at = row // 32 * 32 + source
        if at >= len(values):
            fault(f"{what}: partition {row} is copied from partition {at} of a source with {len(values)}")
        target[row] = values[at]
    dst.write(target.reshape(dst.shape))
    session.core().ledger.compute("vector", what, dst.per_partition)
