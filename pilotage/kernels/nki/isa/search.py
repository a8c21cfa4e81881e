"""Instructions of the vector engine that search each partition for eight values at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from pilotage.kernels.nki import session
from pilotage.kernels.nki.dtypes import Array
from pilotage.kernels.nki.faults import fault
from pilotage.kernels.nki.hardware import DVE_SEARCH_MAX, DVE_SEARCH_MIN
from pilotage.kernels.nki.isa import checks
from pilotage.kernels.nki.tensor import NkiTensor


def _rows(what: str, label: str, value: Any) -> NkiTensor:
    found = checks.tile(what, label, value)
    if not DVE_SEARCH_MIN <= found.per_partition <= DVE_SEARCH_MAX:
        fault(
            f"{what}: {label} has {found.per_partition} elements a partition, of {DVE_SEARCH_MIN} to {DVE_SEARCH_MAX}"
        )
    return found


def _eight(what: str, label: str, value: Any, partitions: int) -> NkiTensor:
    found = checks.tile(what, label, value)
    if found.shape[0] != partitions or found.per_partition != 8:
        fault(f"{what}: {label} {found.shape} must have 8 elements for each of {partitions} partitions")
    return found


def max8(dst: Any, src: Any, dtype: Any = None, name: Any = None) -> None:
    """Find the 8 largest values of each partition, in descending order."""
    src = _rows("max8", "src", src)
    dst = _eight("max8", "dst", dst, src.shape[0])
    values = src.read32().reshape(src.shape[0], -1)
    dst.write(-np.sort(-values, axis=1)[:, :8].reshape(dst.shape))
    session.core().ledger.compute("vector", "max8", src.per_partition)


def _match(values: Array, wanted: Array, order: range) -> Array:
    """Pair each wanted value, in `order`, with the first position that holds it and is not taken; -1 without one."""
    found = np.full(wanted.shape, -1, np.int64)
    for row in range(len(values)):
        taken: set[int] = set()
        for column in order:
            for at in np.flatnonzero(values[row] == wanted[row, column]):
                if int(at) not in taken:
                    taken.add(int(at))
                    found[row, column] = at
                    break
    return found


def _write_positions(what: str, dst: NkiTensor, found: Array) -> None:
    if str(dst.dtype) not in ("uint16", "uint32"):
        fault(f"{what}: positions into {dst.dtype!r}", do="use uint16 or uint32")
    missing = np.iinfo(dst.dtype.held).max
    dst.write(np.where(found < 0, missing, found).reshape(dst.shape))


def nc_find_index8(dst: Any, data: Any, vals: Any, dtype: Any = None, name: Any = None) -> None:
    """Find where each of 8 values of a partition stands; equal values take their places in ascending order."""
    data = _rows("nc_find_index8", "data", data)
    dst = _eight("nc_find_index8", "dst", dst, data.shape[0])
    vals = _eight("nc_find_index8", "vals", vals, data.shape[0])
    found = _match(data.read32().reshape(data.shape[0], -1), vals.read32().reshape(data.shape[0], 8), range(8))
    _write_positions("nc_find_index8", dst, found)
    session.core().ledger.compute("vector", "nc_find_index8", data.per_partition)


def nc_match_replace8(
    dst: Any, data: Any, vals: Any, imm: float, dst_idx: Any = None, dtype: Any = None, name: Any = None
) -> None:
    """Replace the first occurrence of each of 8 values by `imm`; equal values take their places in descending order."""
    what = "nc_match_replace8"
    data = _rows(what, "data", data)
    dst, vals = checks.tile(what, "dst", dst), _eight(what, "vals", vals, data.shape[0])
    checks.same_tile(what, dst, data=data)
    values = data.read32().reshape(data.shape[0], -1).copy()
    found = _match(values, vals.read32().reshape(data.shape[0], 8), range(7, -1, -1))
    rows = np.arange(len(values))[:, None]
    hit = found >= 0
    values[np.broadcast_to(rows, found.shape)[hit], found[hit]] = np.float32(imm)
    if dst_idx is not None:
        _write_positions(what, _eight(what, "dst_idx", dst_idx, data.shape[0]), found)
    dst.write(values.reshape(dst.shape))
    session.core().ledger.compute("vector", what, data.per_partition)
