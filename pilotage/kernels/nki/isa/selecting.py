"""Instructions of the vector engine that choose between values."""

from __future__ import annotations

from typing import Any

import numpy as np

from pilotage.kernels.nki import session
from pilotage.kernels.nki.faults import fault
from pilotage.kernels.nki.hardware import nc_version
from pilotage.kernels.nki.isa import checks
from pilotage.kernels.nki.isa.accumulators import accumulate
from pilotage.kernels.nki.isa.constants import reduce_cmd
from pilotage.kernels.nki.operators import OPERATORS, operator
from pilotage.kernels.nki.tensor import NkiTensor

FP32_MIN = np.finfo(np.float32).min
_RANGE_COMPARISONS = ("equal", "less", "less_equal", "greater", "greater_equal")


def tensor_copy_predicated(
    dst: Any, src: Any, predicate: Any, reverse_pred: bool = False, dtype: Any = None, name: Any = None
) -> None:
    """Copy where the predicate is nonzero; leave the rest of `dst` as it is."""
    what = "tensor_copy_predicated"
    dst, predicate = checks.tile(what, "dst", dst), checks.tile(what, "predicate", predicate)
    if str(predicate.dtype) not in ("uint8", "uint16", "uint32", "bool"):
        fault(f"{what}: predicate is {predicate.dtype!r}", do="use uint8, uint16 or uint32")
    checks.same_tile(what, dst, predicate=predicate)
    chosen = checks.shaped(predicate.read(), dst) != 0
    chosen = ~chosen if reverse_pred else chosen
    if isinstance(src, NkiTensor):
        src = checks.tile(what, "src", src)
        checks.same_tile(what, dst, src=src)
        checks.not_both_psum(what, src=src, predicate=predicate)
        values = checks.shaped(src.read32(), dst)
    else:
        values = np.float32(src)
    dst.write(np.where(chosen, values, dst.read32()))
    session.core().ledger.compute("vector", what, 2 * dst.per_partition)


def range_select(
    dst: Any,
    on_true_tile: Any,
    comp_op0: Any,
    comp_op1: Any,
    bound0: Any,
    bound1: Any,
    reduce_cmd: Any = reduce_cmd.reset_reduce,
    reduce_res: Any = None,
    reduce_op: Any = OPERATORS["maximum"],
    range_start: Any = 0,
    on_false_value: Any = FP32_MIN,
    dtype: Any = None,
    name: Any = None,
) -> None:
    """Keep the elements whose position (plus `range_start`) satisfies both comparisons; elsewhere the least float32."""
    what = "range_select"
    checks.needs(what, nc_version.gen3)
    dst, on_true_tile = checks.tile(what, "dst", dst), checks.tile(what, "on_true_tile", on_true_tile)
    checks.same_tile(what, dst, on_true_tile=on_true_tile)
    checks.float_dtype(what, "on_true_tile", on_true_tile)
    if np.float32(on_false_value) != FP32_MIN:
        fault(f"{what}: on_false_value={on_false_value!r}", do=f"the hardware has only {FP32_MIN}")
    keep = np.asarray(True)
    position = (np.float32(range_start) + np.arange(dst.per_partition, dtype=np.float32))[None, :]
    for label, op, bound in (("0", comp_op0, bound0), ("1", comp_op1, bound1)):
        compare = operator(op, what=f"comp_op{label}")
        if compare.name not in _RANGE_COMPARISONS:
            fault(f"{what}: comp_op{label}={op!r}", do=f"it has {', '.join(_RANGE_COMPARISONS)}")
        if not isinstance(bound, NkiTensor) or str(bound.dtype) != "float32":
            fault(f"{what}: bound{label} is {bound!r}, and must be a float32 tile")
        limit = checks.vector_or_scalar(what, f"bound{label}", bound, on_true_tile).reshape(-1, 1)
        keep = keep & compare.function(position, limit).astype(bool)
    values = on_true_tile.read32().reshape(dst.shape[0], -1)
    result = np.where(keep, values, np.float32(FP32_MIN))
    accumulate(
        what, session.core().vector_registers, result, operator(reduce_op, what="reduce_op"), reduce_cmd, reduce_res
    )
    dst.write(result.reshape(dst.shape))
    session.core().ledger.compute("vector", what, dst.per_partition)


def select_reduce(
    dst: Any,
    predicate: Any,
    on_true: Any,
    on_false: Any,
    reduce_res: Any = None,
    reduce_cmd: Any = reduce_cmd.idle,
    reduce_op: Any = OPERATORS["maximum"],
    reverse_pred: bool = False,
    dtype: Any = None,
    name: Any = None,
) -> None:
    """Choose `on_true` where the predicate is nonzero, else `on_false`; the largest of each partition if asked."""
    what = "select_reduce"
    dst, predicate, on_true = (
        checks.tile(what, label, one) for label, one in (("dst", dst), ("predicate", predicate), ("on_true", on_true))
    )
    checks.same_tile(what, dst, predicate=predicate, on_true=on_true)
    checks.not_both_psum(what, predicate=predicate, on_true=on_true)
    if not predicate.dtype.is_integer or predicate.dtype.itemsize > 2:
        fault(f"{what}: predicate is {predicate.dtype!r}", do="use an integer of 8 or 16 bits")
    if operator(reduce_op, what="reduce_op").name != "maximum":
        fault(f"{what}: reduce_op={reduce_op!r}", do="it only has the maximum")
    chosen = checks.shaped(predicate.read(), dst) != 0
    chosen = ~chosen if reverse_pred else chosen
    other = checks.vector_or_scalar(what, "on_false", on_false, dst)
    values = np.where(chosen, checks.shaped(on_true.read32(), dst), other)
    accumulate(what, session.core().vector_registers, values, OPERATORS["maximum"], reduce_cmd, reduce_res)
    dst.write(values)
    session.core().ledger.compute("vector", what, 2 * dst.per_partition)
