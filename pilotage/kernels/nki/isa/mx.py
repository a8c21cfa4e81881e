"""Microscaling instructions of gen4: 8- and 4-bit floats, four to an element, with a scale for every 32 values.

A group is 8 partitions times the 4 values of an element. Its scale, a power of two held as a biased exponent, stands in
the first 4 partitions of the group's own quadrant of 32: group g of quadrant q in partition 32 * q + g.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from pilotage.kernels.nki import session
from pilotage.kernels.nki.dtypes import Array
from pilotage.kernels.nki.faults import fault
from pilotage.kernels.nki.hardware import nc_version
from pilotage.kernels.nki.isa import checks
from pilotage.kernels.nki.isa.tensor import MIN_CYCLES, _put, _tiling
from pilotage.kernels.nki.memory import MemoryRegion
from pilotage.kernels.nki.operators import quiet
from pilotage.kernels.nki.tensor import NkiTensor

_SBUF, _PSUM = (MemoryRegion.sbuf,), (MemoryRegion.psum,)
_ELEMENTS = {"float8_e4m3fn_x4": (ml_dtypes.float8_e4m3fn, 8), "float8_e5m2_x4": (ml_dtypes.float8_e5m2, 15)}
_BIAS = 127


def unpack(tile: NkiTensor) -> Array:
    """Give the four values of every element: [P, F] packed to [P, F, 4] float32."""
    raw = np.ascontiguousarray(tile.read().reshape(tile.shape[0], -1))
    if str(tile.dtype) == "float4_e2m1fn_x4":
        nibbles = (raw[..., None] >> np.array([0, 4, 8, 12], np.uint16)) & 0xF
        return nibbles.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    kind, _ = _ELEMENTS[str(tile.dtype)]
    return raw.view(np.uint8).reshape(*raw.shape, 4).view(kind).astype(np.float32)


def _scale_rows(partitions: int) -> Array:
    """Give, for each data partition, the partition of the scale tile that holds its scale."""
    lanes = np.arange(partitions)
    return lanes // 32 * 32 + lanes % 32 // 8


def _scaled(values: NkiTensor, scales: NkiTensor, what: str) -> Array:
    table = scales.read().reshape(scales.shape[0], -1)
    rows = _scale_rows(values.shape[0])
    if rows.max() >= len(table) or table.shape[1] != values.per_partition:
        fault(
            f"{what}: scales {scales.shape} for {values.shape}", do="a scale for every 8 partitions, in their quadrant"
        )
    exponent = np.ascontiguousarray(table).view(np.uint8).astype(np.float32) - _BIAS
    return unpack(values) * np.exp2(exponent[rows])[:, :, None]


def nc_matmul_mx(
    dst: Any,
    stationary: Any,
    moving: Any,
    stationary_scale: Any,
    moving_scale: Any,
    tile_position: Any = None,
    tile_size: Any = None,
    accumulate: bool | None = None,
    name: Any = None,
) -> None:
    """Multiply scaled packed matrices; the contraction runs over partitions and the four values of each element."""
    what = "nc_matmul_mx"
    checks.needs(what, nc_version.gen4)
    dst = checks.tile(what, "dst", dst, where=_PSUM)
    stationary, moving, stationary_scale, moving_scale = (
        checks.tile(what, label, one, where=_SBUF)
        for label, one in (("stationary", stationary), ("moving", moving),
                           ("stationary_scale", stationary_scale), ("moving_scale", moving_scale))
    )  # fmt: skip
    rows, _ = _tiling(tile_position or (), tile_size or (), nc_version.gen4)
    partitions = stationary.shape[0]
    for label, one in (("stationary", stationary), ("moving", moving)):
        if one.dtype.kind != "packed":
            fault(f"{what}: {label} is {one.dtype!r}", do="use a type of four packed values")
    if moving.shape[0] != partitions or partitions % 32 or partitions > rows:
        fault(f"{what}: {partitions} and {moving.shape[0]} partitions", do="equal, a multiple of 32, within the tile")
    m, n = stationary.per_partition, moving.per_partition
    if m > 128 or m % 2 or (dst.shape[0], dst.per_partition) != (m, n):
        fault(f"{what}: stationary {stationary.shape} and moving {moving.shape} into {dst.shape}")
    a = _scaled(stationary, stationary_scale, what).transpose(0, 2, 1).reshape(partitions * 4, m)
    b = _scaled(moving, moving_scale, what).transpose(0, 2, 1).reshape(partitions * 4, n)
    with quiet():
        _put(dst, a.T @ b, accumulate)
    session.core().ledger.matmul(what, max(n, MIN_CYCLES), m * n * partitions * 4)


def quantize_mx(dst: Any, src: Any, dst_scale: Any, name: Any = None) -> None:
    """Quantise to packed 8-bit floats: groups of 32 over 2^(floor(log2(largest)) - (largest exponent - 1))."""
    what = "quantize_mx"
    checks.needs(what, nc_version.gen4)
    dst, src, dst_scale = (
        checks.tile(what, label, one, where=_SBUF)
        for label, one in (("dst", dst), ("src", src), ("dst_scale", dst_scale))
    )
    if str(dst.dtype) not in _ELEMENTS or str(src.dtype) not in ("bfloat16", "float16"):
        fault(f"{what} from {src.dtype!r} to {dst.dtype!r}", do=f"from bfloat16 or float16 to {' or '.join(_ELEMENTS)}")
    partitions, width = src.shape[0], src.per_partition
    if partitions % 32 or width % 4 or dst.shape[0] != partitions or dst.per_partition * 4 != width:
        fault(f"{what} of {src.shape} into {dst.shape}", do="partitions in 32s, free elements in 4s")
    kind, most = _ELEMENTS[str(dst.dtype)]
    groups = src.read32().reshape(partitions // 8, 8, width // 4, 4)
    largest = np.abs(groups).max((1, 3))
    with quiet():
        exponent = np.where(largest > 0, np.floor(np.log2(largest)) - (most - 1), -_BIAS).clip(-_BIAS, _BIAS)
    scaled = groups / np.exp2(exponent)[:, None, :, None].astype(np.float32)
    packed = scaled.astype(kind).reshape(partitions, width // 4, 4).view(np.uint8)
    dst.array()[...] = np.ascontiguousarray(packed).view(np.uint32).reshape(dst.shape)
    rows = _scale_rows(partitions)[::8]
    if rows.max() >= dst_scale.shape[0] or dst_scale.per_partition != width // 4:
        fault(f"{what}: scales of {src.shape} into {dst_scale.shape}")
    table = dst_scale.read().reshape(dst_scale.shape[0], -1).view(np.uint8).copy()
    table[rows] = (exponent + _BIAS).astype(np.uint8)
    place = dst_scale.array()
    place[...] = table.view(place.dtype).reshape(place.shape)
    session.core().ledger.compute("vector", what, width)
