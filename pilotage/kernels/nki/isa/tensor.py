"""Instructions of the tensor engine: matrix multiplication into PSUM, and the transpose that is one."""

from __future__ import annotations

from typing import Any

import numpy as np

from pilotage.kernels.nki import session
from pilotage.kernels.nki.dtypes import Array, convert, round_to_tf32
from pilotage.kernels.nki.faults import fault
from pilotage.kernels.nki.hardware import (
    MOVING_FREE,
    PARTITIONS,
    PSUM_BANK_BYTES,
    PSUM_BYTES,
    STATIONARY_FREE,
    nc_version,
)
from pilotage.kernels.nki.isa import checks
from pilotage.kernels.nki.isa.constants import engine, matmul_perf_mode
from pilotage.kernels.nki.memory import BY_ENGINE, BY_MATMUL, UNWRITTEN, MemoryRegion
from pilotage.kernels.nki.operators import quiet
from pilotage.kernels.nki.tensor import NkiTensor

_SBUF, _PSUM = (MemoryRegion.sbuf,), (MemoryRegion.psum,)
_INPUTS = ("float8_e4m3", "float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "tfloat32", "float32")
_WIDE = ("tfloat32", "float32")
MIN_CYCLES = 64  # initiation interval of a short instruction (architecture guide)
LOAD_SPEEDUP = 4.0  # a stationary matrix loads up to 4 times as fast as a moving one streams


def nc_matmul(
    dst: Any,
    stationary: Any,
    moving: Any,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: Any = (),
    tile_size: Any = (),
    perf_mode: Any = matmul_perf_mode.none,
    dtype: Any = None,
    name: Any = None,
) -> None:
    """Compute stationary.T @ moving into PSUM; the contraction runs over the partitions of both."""
    dst = checks.tile("nc_matmul", "dst", dst, where=_PSUM)
    stationary = checks.tile("nc_matmul", "stationary", stationary, where=_SBUF)
    moving = checks.tile("nc_matmul", "moving", moving, where=_SBUF)
    version = session.core().launch.generation.version
    doubled = perf_mode is matmul_perf_mode.double_row
    if doubled:
        _check_double_row(stationary, moving, version, is_transpose)
    rows, columns = _tiling(tile_position, tile_size, version)
    _check_shapes(dst, stationary, moving, rows, columns, version, doubled)
    _check_types(dst, stationary, moving, is_transpose, version)
    if is_transpose:
        result = _transposed_through(stationary, moving)
        _put(dst, result, False)
        macs = 0
    else:
        result = _product(stationary, moving, doubled)
        _put(dst, result, accumulate)
        macs = result.size * stationary.shape[0] * (2 if doubled else 1)
    # The engine takes float32 at a quarter of its rate; a transpose of it at half.
    slow = (2.0 if is_transpose else 4.0) if str(moving.dtype) == "float32" else 1.0
    count = moving.per_partition // (2 if doubled else 1)
    load = stationary.per_partition / (2 if doubled else 1) / LOAD_SPEEDUP
    share = (rows / PARTITIONS) * (columns / PARTITIONS)
    cycles = max(count, MIN_CYCLES, load) * slow * share
    session.core().ledger.matmul("nc_matmul" if not is_transpose else "nc_transpose", cycles, macs)


def _product(stationary: NkiTensor, moving: NkiTensor, doubled: bool) -> Array:
    a, b = stationary.read32(), moving.read32()
    if str(stationary.dtype) == "tfloat32":
        a = round_to_tf32(a)
    if str(moving.dtype) == "tfloat32":
        b = round_to_tf32(b)
    partitions = a.shape[0]
    if doubled:
        a, b = a.reshape(2 * partitions, -1), b.reshape(2 * partitions, -1)
    else:
        a, b = a.reshape(partitions, -1), b.reshape(partitions, -1)
    with quiet():
        out: Array = a.T @ b
    return out


def _transposed_through(stationary: NkiTensor, moving: NkiTensor) -> Array:
    """Move bits through the identity: exact for everything, NaN and infinity included."""
    values = stationary.read().reshape(stationary.shape[0], -1)
    pattern = moving.read32().reshape(moving.shape[0], -1)
    if not np.isin(pattern, (0.0, 1.0)).all() or (pattern.sum(0) > 1).any():
        fault(
            "nc_matmul with is_transpose needs a moving matrix with at most a single 1 in each column",
            do="use the identity",
        )
    source = pattern.argmax(0)
    out = values.T[:, source].copy()
    out[:, pattern.sum(0) == 0] = 0
    return out


def _put(dst: NkiTensor, result: Array, accumulate: bool | None) -> None:
    """Overwrite what this PSUM tile never received from a matmul, accumulate onto what it did."""
    result = result.reshape(dst.shape)
    if accumulate is False:
        dst.write(result, BY_MATMUL)
        return
    states = dst.states()
    written = np.count_nonzero(states)
    if accumulate and written < dst.size:
        fault(
            f"nc_matmul accumulates onto {dst!r}, of which {dst.size - written} elements no matmul ever wrote",
            do="accumulate=False (or leave it out) on the first one",
        )
    if not written:
        dst.write(result, BY_MATMUL)
        return
    before = dst.read()
    dirty = states == BY_ENGINE
    old = session.core().launch.generation.version < nc_version.gen4
    if old and dirty.any() and np.any(before[dirty].astype(np.float32) != 0):
        fault(
            f"nc_matmul accumulates onto values that another engine put into {dst!r}, which is undefined before gen4",
            do="add them afterwards, or use a fresh PSUM tile",
        )
    with quiet():
        total = before.astype(np.float32) + result
    dst.write(total if written == dst.size else np.where(states == UNWRITTEN, result, total), BY_MATMUL)


def _tiling(position: Any, size: Any, version: nc_version) -> tuple[int, int]:
    if not position and not size:
        return PARTITIONS, PARTITIONS
    if not position or not size:
        fault("nc_matmul: tile_position and tile_size go together")
    (row, column), (rows, columns) = tuple(position), tuple(size)
    least = 64 if version < nc_version.gen3 else 32
    for label, start, extent in (("row", row, rows), ("column", column, columns)):
        if extent not in (32, 64, 128) or extent < least:
            fault(f"nc_matmul: a {label} tile of {extent}", do="tiles have 32, 64 or 128")
        if start % extent or not 0 <= start < 128:
            fault(f"nc_matmul: tile {label} {start} is not a multiple of its size {extent} below 128")
    return int(rows), int(columns)


def _check_double_row(stationary: NkiTensor, moving: NkiTensor, version: nc_version, transpose: bool) -> None:
    if version < nc_version.gen3:
        fault("nc_matmul: double_row needs gen3")
    if transpose:
        fault("nc_matmul: double_row cannot transpose")
    for label, one in (("stationary", stationary), ("moving", moving)):
        if not str(one.dtype).startswith("float8"):
            fault(f"nc_matmul: double_row takes 8-bit floats, {label} is {one.dtype!r}")
        if one.ndim < 3 or one.shape[1] != 2:
            fault(f"nc_matmul: double_row takes [K, 2, ...], {label} is {one.shape}")


def _check_shapes(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    rows: int,
    columns: int,
    version: nc_version,
    doubled: bool,
) -> None:
    if stationary.shape[0] != moving.shape[0]:
        fault(f"nc_matmul contracts over partitions: stationary has {stationary.shape[0]}, moving {moving.shape[0]}")
    if stationary.shape[0] > rows:
        fault(f"nc_matmul: {stationary.shape[0]} partitions in a tile of {rows} rows")
    m = stationary.per_partition // (2 if doubled else 1)
    n = moving.per_partition // (2 if doubled else 1)
    if m > min(columns, STATIONARY_FREE):
        fault(f"nc_matmul: stationary has {m} free elements, of at most {min(columns, STATIONARY_FREE)}", do="tile it")
    most = MOVING_FREE if version < nc_version.gen4 else PSUM_BYTES // dst.dtype.itemsize
    if n > most:
        fault(f"nc_matmul: moving has {n} free elements, of at most {most}", do="tile it")
    if dst.shape[0] != m or dst.per_partition != n:
        fault(f"nc_matmul: stationary {stationary.shape} and moving {moving.shape} give [{m}, {n}], dst is {dst.shape}")
    if version < nc_version.gen4:
        lane = dst.storage.lane * dst.storage.dtype.itemsize // dst.dtype.itemsize
        width = dst.dtype.itemsize
        first = (dst.offset % max(lane, 1)) * width + dst.storage.base_bank
        last = first + sum((size - 1) * step for size, step in zip(dst.shape[1:], dst.strides[1:], strict=True)) * width
        if first // PSUM_BANK_BYTES != last // PSUM_BANK_BYTES:
            fault(
                f"nc_matmul: dst {dst!r} crosses from one PSUM bank of {PSUM_BANK_BYTES} bytes into the next",
                do="tile it",
            )


def _check_types(
    dst: NkiTensor, stationary: NkiTensor, moving: NkiTensor, transpose: bool, version: nc_version
) -> None:
    for label, one in (("stationary", stationary), ("moving", moving)):
        if str(one.dtype) not in _INPUTS:
            if transpose and label == "stationary":
                continue
            fault(f"nc_matmul: {label} is {one.dtype!r}", do=f"use {', '.join(_INPUTS)}")
    if (str(stationary.dtype) in _WIDE) != (str(moving.dtype) in _WIDE) and not session.core().launch.legacy:
        fault(
            f"nc_matmul: stationary {stationary.dtype!r} with moving {moving.dtype!r}", do="float32 goes with float32"
        )
    if transpose:
        return
    allowed = ("float32",) if version < nc_version.gen4 else ("float32", "bfloat16")
    if str(dst.dtype) not in allowed and not session.core().launch.legacy:
        fault(f"nc_matmul: dst is {dst.dtype!r}", do=f"accumulate in {' or '.join(allowed)}")


def nc_transpose(dst: Any, data: Any, engine: Any = engine.unknown, dtype: Any = None, name: Any = None) -> None:
    """Swap the partitions with the (flattened) free dimensions."""
    dst, data = checks.tile("nc_transpose", "dst", dst), checks.tile("nc_transpose", "data", data)
    chosen = _transpose_engine(dst, data, engine)
    most = PARTITIONS if chosen == "tensor" else 32
    if data.shape[0] > most or data.per_partition > most:
        fault(f"nc_transpose of {data.shape} on the {chosen} engine, which takes [{most}, {most}]", do="tile it")
    if (dst.shape[0], dst.per_partition) != (data.per_partition, data.shape[0]):
        fault(f"nc_transpose of {data.shape} into {dst.shape}")
    widened = str(data.dtype).startswith("float8") and dst.dtype.itemsize == 2
    if dst.dtype != data.dtype and not widened and not session.core().launch.legacy:
        fault(f"nc_transpose of {data.dtype!r} into {dst.dtype!r}", do="the types must be equal")
    flat = data.read().reshape(data.shape[0], -1)
    dst.write(convert(flat.T, dst.dtype).reshape(dst.shape), BY_MATMUL if chosen == "tensor" else BY_ENGINE)
    ledger = session.core().ledger
    if chosen == "tensor":
        slow = 2.0 if data.dtype.itemsize == 4 else 1.0
        ledger.matmul("nc_transpose", max(data.shape[0], MIN_CYCLES) * slow, 0)
    else:
        ledger.compute("vector", "nc_transpose", dst.per_partition)


def _transpose_engine(dst: NkiTensor, data: NkiTensor, asked: Any) -> str:
    fits_tensor = data.buffer is MemoryRegion.sbuf and dst.buffer is MemoryRegion.psum
    fits_vector = data.shape[0] <= 32 and data.per_partition <= 32
    if asked is engine.tensor:
        if not fits_tensor:
            fault(
                f"nc_transpose on the tensor engine from {data.buffer.value} to {dst.buffer.value}",
                do="it goes from SBUF to PSUM",
            )
        return "tensor"
    if asked is engine.vector:
        return "vector"
    if asked is not None and asked is not engine.unknown:
        fault(f"nc_transpose cannot run on {asked}")
    if fits_tensor:
        return "tensor"
    if fits_vector:
        return "vector"
    fault(
        f"nc_transpose of {data.shape} from {data.buffer.value} to {dst.buffer.value}",
        do="the tensor engine goes from SBUF to PSUM, the vector engine takes [32, 32]",
    )
