"""Instructions of the vector engine that carry a value along a partition."""

from __future__ import annotations

from typing import Any

import numpy as np

from pilotage.kernels.nki import session
from pilotage.kernels.nki.faults import fault
from pilotage.kernels.nki.isa import checks
from pilotage.kernels.nki.isa.accumulators import begin
from pilotage.kernels.nki.isa.constants import reduce_cmd
from pilotage.kernels.nki.isa.vector import combine
from pilotage.kernels.nki.operators import alu, quiet


def tensor_scalar_cumulative(
    dst: Any,
    src: Any,
    op0: Any,
    op1: Any,
    imm0: Any,
    imm1: Any = None,
    reduce_cmd: Any = reduce_cmd.reset_reduce,
    name: Any = None,
) -> None:
    """Compute a running reduction of src op0 imm0 along the free dimensions."""
    what = "tensor_scalar_cumulative"
    dst, src = checks.tile(what, "dst", dst), checks.tile(what, "src", src)
    checks.same_tile(what, dst, src=src)
    if any(str(one.dtype) in ("int32", "uint32") for one in (dst, src)):
        fault(f"{what} on 32-bit integers", do="the instruction has no such form")
    first, second = alu(op0, what="op0"), alu(op1, what="op1")
    if second.name not in ("add", "subtract", "multiply", "maximum", "minimum"):
        fault(f"{what}: op1={second!r} cannot accumulate")
    ready = checks.vector_or_scalar(what, "imm0", imm0, src)
    values = combine(first, src.read32(), ready).reshape(src.shape[0], -1)
    registers = session.core().vector_registers
    held = begin(what, registers, second, reduce_cmd, imm1, src.shape[0])
    out = np.empty_like(values)
    with quiet():
        for at in range(values.shape[1]):
            held = second.function(values[:, at], held)
            out[:, at] = held
    registers[: len(held)] = held
    dst.write(out.reshape(dst.shape))
    session.core().ledger.compute("vector", what, dst.per_partition)


def tensor_tensor_scan(
    dst: Any,
    data0: Any,
    data1: Any,
    initial: Any,
    op0: Any,
    op1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
    dtype: Any = None,
    name: Any = None,
) -> None:
    """Compute x[i] = (data0[i] op0 x[i-1]) op1 data1[i] along the free dimensions."""
    what = "tensor_tensor_scan"
    dst, data0, data1 = (
        checks.tile(what, label, one) for label, one in (("dst", dst), ("data0", data0), ("data1", data1))
    )
    checks.same_tile(what, dst, data0=data0, data1=data1)
    checks.not_both_psum(what, data0=data0, data1=data1)
    first, second = (
        alu(op0, what="op0", legacy=session.core().launch.legacy),
        alu(op1, what="op1", legacy=session.core().launch.legacy),
    )
    a, b = data0.read32().reshape(dst.shape[0], -1), data1.read32().reshape(dst.shape[0], -1)
    start = checks.vector_or_scalar(what, "initial", initial, data0)
    held = np.broadcast_to(np.asarray(start, np.float32).reshape(-1), (dst.shape[0],))
    out = np.empty_like(a)
    for at in range(a.shape[1]):
        held = combine(second, combine(first, a[:, at], held, reverse0), b[:, at], reverse1)
        out[:, at] = held
    dst.write(out.reshape(dst.shape))
    session.core().ledger.compute("vector", what, 2 * dst.per_partition)
