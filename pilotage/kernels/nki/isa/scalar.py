"""Instructions of the scalar engine: f(data * scale + bias)."""

from __future__ import annotations

from typing import Any

import numpy as np

from pilotage.kernels.nki import session
from pilotage.kernels.nki.dtypes import Array
from pilotage.kernels.nki.faults import fault
from pilotage.kernels.nki.hardware import nc_version
from pilotage.kernels.nki.isa import checks
from pilotage.kernels.nki.isa.accumulators import accumulate
from pilotage.kernels.nki.isa.constants import reduce_cmd
from pilotage.kernels.nki.operators import OPERATORS, operator, quiet
from pilotage.kernels.nki.operators import activation as activation_function
from pilotage.kernels.nki.tensor import NkiTensor


def _finish(
    what: str, dst: NkiTensor, values: Array, reduce_op: Any, reduce_res: Any, command: Any, only_add: bool
) -> None:
    here = session.core()
    if command is not reduce_cmd.idle or reduce_res is not None:
        op = OPERATORS["add"] if reduce_op is None else operator(reduce_op, what="reduce_op")
        if only_add and op.name != "add":
            fault(f"{what}: reduce_op={op!r}", do="the scalar engine only adds")
        accumulate(what, here.scalar_registers, values, op, command, reduce_res)
    dst.write(checks.shaped(values, dst))
    here.ledger.compute("scalar", what, dst.per_partition)


def activation(
    dst: Any,
    op: Any,
    data: Any,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Any = None,
    reduce_res: Any = None,
    reduce_cmd: Any = reduce_cmd.idle,
    dtype: Any = None,
    name: Any = None,
    engine: Any = None,
) -> None:
    """Compute op(data * scale + bias), and the sum of the results if asked."""
    dst, data = checks.tile("activation", "dst", dst), checks.tile("activation", "data", data)
    checks.same_tile("activation", dst, data=data)
    values = scaled(data, scale, bias, session.core().launch.generation.version)
    with quiet():
        values = activation_function(op)(values)
    _finish("activation", dst, values, reduce_op, reduce_res, reduce_cmd, True)


def scaled(data: NkiTensor, scale: Any, bias: Any, version: nc_version) -> Array:
    """Compute data * scale + bias in float32."""
    values = data.read32()
    if isinstance(scale, NkiTensor) or scale != 1.0:
        if isinstance(scale, NkiTensor) and str(scale.dtype) != "float32":
            fault(f"activation: scale is {scale.dtype!r}, and must be float32")
        with quiet():
            values = values * checks.vector_or_scalar("activation", "scale", scale, data)
    if bias is None:
        return values
    if not isinstance(bias, NkiTensor) and bias == 0:
        return values
    if not isinstance(bias, NkiTensor) and version < nc_version.gen3:
        fault("activation: a constant bias needs gen3", do="put it in a tile of one element a partition")
    with quiet():
        out: Array = values + checks.vector_or_scalar("activation", "bias", bias, data)
    return out


def activation_reduce(
    dst: Any,
    op: Any,
    data: Any,
    reduce_op: Any,
    reduce_res: Any,
    bias: Any = None,
    scale: Any = 1.0,
    dtype: Any = None,
    name: Any = None,
) -> None:
    """Compute op(data * scale + bias) and reduce the results from zero."""
    activation(dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd.reset_reduce)


def activate2(
    dst: Any,
    op: Any,
    data: Any,
    imm0: Any,
    imm1: Any,
    op0: Any,
    op1: Any,
    relu_param: Any = 0.0,
    reverse0: bool = False,
    reverse1: bool = False,
    reduce_op: Any = None,
    reduce_res: Any = None,
    reduce_cmd: Any = reduce_cmd.idle,
    name: Any = None,
) -> None:
    """Compute op((data op0 imm0) op1 imm1), and a reduction of the results if asked."""
    checks.needs("activate2", nc_version.gen4)
    dst, data = checks.tile("activate2", "dst", dst), checks.tile("activate2", "data", data)
    checks.same_tile("activate2", dst, data=data)
    first, second = operator(op0, what="op0"), operator(op1, what="op1")
    if (first.name, second.name) not in _STAGES:
        fault(f"activate2 with ({first!r}, {second!r})", do=f"it has {', '.join(map(str, _STAGES))}")
    values = data.read32()
    with quiet():
        for one, operand, reverse, label in ((first, imm0, reverse0, "imm0"), (second, imm1, reverse1, "imm1")):
            if one.name != "bypass":
                ready = checks.vector_or_scalar("activate2", label, operand, data)
                values = one.function(ready, values) if reverse else one.function(values, ready)
        if getattr(op, "__name__", "") == "prelu":
            slope = checks.vector_or_scalar("activate2", "relu_param", relu_param, data)
            values = np.where(values >= 0, values, values * slope)
        else:
            values = activation_function(op)(values)
    _finish("activate2", dst, values, reduce_op, reduce_res, reduce_cmd, False)


_STAGES = (("multiply", "add"), ("multiply", "subtract"), ("multiply", "bypass"), ("add", "bypass"),
           ("subtract", "bypass"), ("bypass", "bypass"))  # fmt: skip
