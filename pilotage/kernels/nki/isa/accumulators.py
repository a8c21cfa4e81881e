"""The accumulators that the vector and the scalar engine keep, one float32 a partition."""

from __future__ import annotations

from typing import Any

import numpy as np

from pilotage.kernels.nki.dtypes import Array
from pilotage.kernels.nki.faults import fault
from pilotage.kernels.nki.isa.constants import reduce_cmd
from pilotage.kernels.nki.memory import BY_ENGINE
from pilotage.kernels.nki.operators import Op, quiet
from pilotage.kernels.nki.tensor import NkiTensor


def begin(what: str, registers: Array, op: Op, command: Any, initial: Any, partitions: int) -> Array:
    """Give what a reduction starts from under a `reduce_cmd`."""
    if op.identity is None:
        fault(f"{what}: {op!r} cannot reduce")
    if command is reduce_cmd.reset_reduce:
        return np.full(partitions, op.identity, np.float32)
    if command is reduce_cmd.reduce:
        return registers[:partitions].copy()
    if command is reduce_cmd.load_reduce:
        if initial is None:
            fault(f"{what}: load_reduce without a value to load")
        value = initial.read32().reshape(-1) if isinstance(initial, NkiTensor) else np.float32(initial)
        return np.broadcast_to(value, (partitions,)).astype(np.float32)
    fault(f"{what}: reduce_cmd={command!r} is not possible here")


def accumulate(
    what: str,
    registers: Array,
    values: Array,
    op: Op,
    command: Any,
    result: NkiTensor | None,
    initial: Any = None,
    negate: bool = False,
) -> None:
    """Reduce `values` over everything but the partition into the registers, and read them out if asked."""
    partitions = values.shape[0]
    if command is reduce_cmd.reset:
        registers[:partitions] = op.identity if op.identity is not None else 0.0
    elif command is not reduce_cmd.idle:
        held = begin(what, registers, op, command, initial, partitions)
        if op.reduction is None:
            fault(f"{what}: {op!r} cannot reduce")
        with quiet():
            new = op.reduction(values.reshape(partitions, -1).astype(np.float32, copy=False), axis=1)
            registers[:partitions] = op.function(held, new)
    if result is None:
        return
    if result.shape[0] != partitions or result.size != partitions:
        fault(f"{what}: reduce_res {result.shape} must have one element for each of {partitions} partitions")
    out = registers[:partitions]
    result.write((-out if negate else out).reshape(result.shape), BY_ENGINE)
