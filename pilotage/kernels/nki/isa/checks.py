"""What every compute instruction asks of its operands, and how their values are read."""

from __future__ import annotations

from typing import Any

import numpy as np

from pilotage.kernels.nki import session
from pilotage.kernels.nki.dtypes import Array
from pilotage.kernels.nki.faults import fault
from pilotage.kernels.nki.hardware import nc_version
from pilotage.kernels.nki.isa.constants import engine
from pilotage.kernels.nki.memory import MemoryRegion
from pilotage.kernels.nki.tensor import NkiTensor

MAX_FREE_DIMS = 4


def tile(instruction: str, name: str, value: Any, *, where: tuple[MemoryRegion, ...] | None = None) -> NkiTensor:
    """Check that an operand is a tile on chip (or in `where`) that starts at a partition an engine can start from."""
    if not isinstance(value, NkiTensor):
        fault(f"{instruction}: {name} is {value!r}, not a tensor")
    allowed = where or (MemoryRegion.sbuf, MemoryRegion.psum)
    if value.buffer not in allowed:
        fault(
            f"{instruction}: {name} is in {value.buffer.value}, not in {' or '.join(one.value for one in allowed)}",
            do="copy it there first",
        )
    if value.dynamic is not None and value.dynamic.kind == "vector":
        fault(f"{instruction}: {name} is addressed row by row at run time", do="only DMA can do that")
    if value.par == 0:
        _check_start(instruction, name, value)
    return value


def _check_start(instruction: str, name: str, value: NkiTensor) -> None:
    storage = value.storage
    if storage.partition_axis or (value.offset < storage.lane and not storage.start):
        return  # blocks of NKI 0.1 lie wherever the compiler puts them
    lane = storage.lane * storage.dtype.itemsize // value.dtype.itemsize
    start, count = storage.start + value.offset // max(lane, 1), value.shape[0]
    legal = (0,) if count > 64 else (0, 64) if count > 32 else (0, 32, 64, 96)
    if start not in legal:
        fault(
            f"{instruction}: {name} takes {count} partitions from partition {start}, and an engine starts "
            f"{count} partitions at {' or '.join(map(str, legal))}",
            do="move it with DMA, or lay it out from another partition",
        )


def same_tile(instruction: str, dst: NkiTensor, **others: NkiTensor) -> None:
    """Check that operands have the partitions and the elements a partition of `dst`."""
    for name, one in others.items():
        if one.shape[0] != dst.shape[0]:
            fault(
                f"{instruction}: {name} {one.shape} has {one.shape[0]} partitions, dst {dst.shape} has {dst.shape[0]}"
            )
        if one.size != dst.size:
            fault(f"{instruction}: {name} {one.shape} and dst {dst.shape} differ in elements a partition")


def not_both_psum(instruction: str, **pair: NkiTensor) -> None:
    """Check that not every one of the operands is in PSUM."""
    if all(one.buffer is MemoryRegion.psum for one in pair.values()):
        fault(f"{instruction}: {' and '.join(pair)} are both in PSUM", do="copy one to SBUF")


def vector_or_scalar(instruction: str, name: str, value: Any, like: NkiTensor) -> Any:
    """Read a constant, or a tile of one element a partition, ready to broadcast over tiles shaped as `like`."""
    if isinstance(value, NkiTensor):
        tile(instruction, name, value)
        if value.shape[0] != like.shape[0] or value.size != value.shape[0]:
            fault(f"{instruction}: {name} {value.shape} must have one element for each of {like.shape[0]} partitions")
        return value.read32().reshape((like.shape[0],) + (1,) * (like.ndim - 1))
    if hasattr(value, "is_register"):
        return np.float32(int(value))
    try:
        return np.float32(value)
    except (TypeError, ValueError):
        fault(f"{instruction}: {name}={value!r} is neither a number nor a tile of one element a partition")


def shaped(values: Array, like: NkiTensor) -> Array:
    """Bring values of a tile with equally many elements into the shape of `like`."""
    return values if values.shape == like.shape else values.reshape(like.shape)


def needs(instruction: str, least: nc_version) -> None:
    """Refuse an instruction that this generation does not have."""
    generation = session.core().launch.generation
    if generation.version < least:
        fault(
            f"{instruction} needs {least.name}, and the target is {generation.name}",
            do="set NEURON_PLATFORM_TARGET_OVERRIDE",
        )


def engine_of(instruction: str, asked: Any, allowed: tuple[engine, ...], default: engine) -> engine:
    """Resolve the engine argument."""
    if asked is None or asked is engine.unknown:
        return default
    if asked not in allowed:
        fault(f"{instruction} cannot run on {asked}", do=f"use {' or '.join(one.name for one in allowed)}")
    return asked  # type: ignore[no-any-return]


def no_gpsimd_in_psum(instruction: str, chosen: engine, *tiles: NkiTensor) -> None:
    """Refuse PSUM operands on the engine that cannot reach it."""
    if chosen is engine.gpsimd and any(one.buffer is MemoryRegion.psum for one in tiles):
        fault(f"{instruction}: the GpSimd engine cannot reach PSUM", do="use the vector engine")


def float_dtype(instruction: str, name: str, value: NkiTensor) -> None:
    """Check that a tile holds floats."""
    if not value.dtype.is_float:
        fault(f"{instruction}: {name} is {value.dtype!r}, and must be a float")
