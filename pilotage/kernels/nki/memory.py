"""Storage: the bytes behind tensors, where they lie, and what has been written to PSUM."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import numpy as np

from pilotage.kernels.nki import session
from pilotage.kernels.nki.dtypes import Array, DType
from pilotage.kernels.nki.faults import fault
from pilotage.kernels.nki.hardware import PARTITIONS, PSUM_BANK_BYTES, PSUM_BYTES

UNWRITTEN, BY_MATMUL, BY_ENGINE = 0, 1, 2  # the state of an element of PSUM
INTEGER_SENTINEL = 4


class MemoryRegion(Enum):
    """Where a tensor lives."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"

    @property
    def on_chip(self) -> bool:
        return self in (MemoryRegion.sbuf, MemoryRegion.psum)


def region(asked: Any) -> MemoryRegion:
    """Find the region that a buffer argument means; a string or an allocator of NKI 0.1 is accepted."""
    if isinstance(asked, MemoryRegion):
        return asked
    if asked is None:
        return MemoryRegion.sbuf
    if isinstance(asked, str):
        name = "private_hbm" if asked == "hbm" else asked
        if name in MemoryRegion.__members__:
            return MemoryRegion[name]
    placed = getattr(asked, "region", None)
    if isinstance(placed, MemoryRegion):
        return placed
    fault(f"{asked!r} is not a memory region", do="use nl.sbuf, nl.psum, nl.private_hbm or nl.shared_hbm")


class Storage:
    """Bytes with a base shape.

    Attributes:
        partition_axis: where the partition stands; above 0 only behind the block dimensions of NKI 0.1.
        start: the partition that the first one lies in.
        base_bank: the byte within a PSUM bank that a partition starts at.
        state: who wrote each byte of PSUM.
    """

    __slots__ = (
        "_released_by", "base_bank", "buffer", "dtype", "name", "partition_axis", "partition_bytes", "raw", "shape",
        "start", "state",
    )  # fmt: skip

    def __init__(
        self, shape: tuple[int, ...], dtype: DType, buffer: MemoryRegion, name: str = "", raw: Array | None = None
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.buffer = buffer
        self.name = name
        self.base_bank = self.start = self.partition_axis = 0
        count = math.prod(shape)
        self.raw = np.empty(count * dtype.held.itemsize, np.uint8) if raw is None else raw
        self.state = np.zeros(self.raw.size, np.uint8) if buffer is MemoryRegion.psum else None
        self.partition_bytes = 0
        self._released_by: Any = None

    @property
    def lane(self) -> int:
        """Elements from one partition to the next."""
        return math.prod(self.shape[self.partition_axis + 1 :])

    def typed(self) -> Array:
        """The elements in row-major order."""
        return np.ndarray((math.prod(self.shape),), self.dtype.held, self.raw)

    def __del__(self) -> None:
        ledger = getattr(self, "_released_by", None)
        if ledger is not None:
            ledger.release(self.buffer.value, self.partition_bytes)


def allocate(
    shape: tuple[int, ...], dtype: DType, buffer: MemoryRegion, name: str, address: Any, partition_axis: int
) -> Storage:
    """Make a new tensor's storage, full of NaN (integers: 4), after checking that the chip has room for its tile."""
    if any(not isinstance(one, (int, np.integer)) or one < 1 for one in shape):
        fault(f"shape {shape} has a dimension that is not a positive integer")
    here = session.core()
    storage = Storage(shape, dtype, buffer, name)
    if buffer.on_chip:
        storage.partition_axis = partition_axis
        storage.start = int(address[0] or 0) if isinstance(address, tuple | list) else 0
        storage.partition_bytes = math.prod(shape[partition_axis + 1 :]) * dtype.itemsize
        _check_tile(storage, shape[partition_axis], address, here.launch.generation.sbuf_bytes)
        here.ledger.allocate(buffer.value, storage.partition_bytes)
        storage._released_by = here.ledger
    values = storage.typed()
    if dtype.is_float:
        values[...] = np.nan
    else:
        values[...] = INTEGER_SENTINEL
    return storage


def _check_tile(storage: Storage, partitions: int, address: Any, sbuf_bytes: int) -> None:
    label = f"tensor {storage.name!r}" if storage.name else "tensor"
    if storage.start + partitions > PARTITIONS:
        fault(
            f"{label} {storage.shape} ends at partition {storage.start + partitions}, and there are {PARTITIONS}",
            do="tile the partition dimension",
        )
    if storage.buffer is MemoryRegion.psum:
        if storage.partition_bytes > PSUM_BYTES:
            fault(f"{label} {storage.shape} takes {storage.partition_bytes} bytes a partition of PSUM's {PSUM_BYTES}")
        if isinstance(address, tuple | list) and address[1] is not None:
            if (
                address[1] % PSUM_BANK_BYTES
                and storage.partition_bytes > PSUM_BANK_BYTES - address[1] % PSUM_BANK_BYTES
            ):
                fault(
                    f"{label} at PSUM byte {address[1]} starts inside a bank of {PSUM_BANK_BYTES} bytes and leaves it",
                    do="start at a bank",
                )
            storage.base_bank = address[1] % PSUM_BANK_BYTES
    elif storage.partition_bytes > sbuf_bytes:
        fault(f"{label} {storage.shape} takes {storage.partition_bytes} bytes a partition of SBUF's {sbuf_bytes}")


def wrap(array: Array, dtype: DType, buffer: MemoryRegion, name: str = "") -> Storage:
    """Make storage of a C-contiguous array without copying; writes go through to it."""
    raw = array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)
    return Storage(array.shape, dtype, buffer, name, raw)
