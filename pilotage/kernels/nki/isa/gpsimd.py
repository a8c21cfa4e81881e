"""Instructions of the GpSimd engine: patterns, gathers, reductions across partitions."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from pilotage.kernels.nki import session
from pilotage.kernels.nki.dtypes import Array
from pilotage.kernels.nki.faults import fault
from pilotage.kernels.nki.hardware import nc_version
from pilotage.kernels.nki.isa import checks
from pilotage.kernels.nki.memory import MemoryRegion
from pilotage.kernels.nki.operators import OPERATORS, operator, quiet
from pilotage.kernels.nki.tensor import NkiTensor

_SBUF = (MemoryRegion.sbuf,)
_CORE = 16  # partitions that each of the eight processors reaches
_COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")


def affine(pattern: Any, offset: Any, channel_multiplier: Any, like: NkiTensor, what: str) -> Array:
    """Generate offset + partition * channel_multiplier + the pattern's steps, in the shape of `like`."""
    steps = [(int(step), int(count)) for step, count in pattern]
    if len(steps) > 4 or math.prod(count for _, count in steps) != like.per_partition:
        fault(f"{what}: pattern {pattern} does not make the {like.per_partition} elements a partition of {like.shape}")
    values = np.zeros((1,), np.int64)
    for step, count in steps:
        values = (values[:, None] + np.arange(count, dtype=np.int64) * step).reshape(-1)
    lanes = np.arange(like.shape[0], dtype=np.int64)[:, None] * int(channel_multiplier)
    wide = int(offset) + lanes + values[None, :]
    return wide.astype(np.int32).astype(np.int64).reshape(like.shape)


def iota(
    dst: Any, pattern: Any, offset: Any = 0, channel_multiplier: Any = 0, dtype: Any = None, name: Any = None
) -> None:
    """Write offset + partition * channel_multiplier + a pattern of up to four [step, count]."""
    dst = checks.tile("iota", "dst", dst, where=_SBUF)
    dst.write(affine(pattern, offset, channel_multiplier, dst, "iota"))
    session.core().ledger.compute("gpsimd", "iota", dst.per_partition)


def affine_select(
    dst: Any,
    pattern: Any,
    channel_multiplier: Any,
    on_true_tile: Any,
    on_false_value: Any,
    cmp_op: Any = OPERATORS["equal"],
    offset: Any = 0,
    dtype: Any = None,
    name: Any = None,
) -> None:
    """Keep the elements where the affine value, compared with 0, holds; put a constant elsewhere."""
    what = "affine_select"
    if isinstance(
        on_false_value, NkiTensor
    ):  # NKI 0.2: (dst, pattern, offset, channel_multiplier, tile, value, cmp_op)
        compared = OPERATORS["equal"] if offset == 0 else offset
        channel_multiplier, on_true_tile, on_false_value, cmp_op, offset = (
            on_true_tile, on_false_value, cmp_op, compared, channel_multiplier,
        )  # fmt: skip
    dst = checks.tile(what, "dst", dst, where=_SBUF)
    on_true_tile = checks.tile(what, "on_true_tile", on_true_tile, where=_SBUF)
    checks.same_tile(what, dst, on_true_tile=on_true_tile)
    compare = operator(cmp_op, what="cmp_op")
    if compare.name not in _COMPARISONS:
        fault(f"{what}: cmp_op={cmp_op!r} is no comparison")
    holds = compare.function(affine(pattern, offset, channel_multiplier, dst, what), 0).astype(bool)
    values = checks.shaped(on_true_tile.read32(), dst)
    dst.write(np.where(holds, values, np.float32(on_false_value)))
    session.core().ledger.compute("gpsimd", what, dst.per_partition)


def tensor_partition_reduce(dst: Any, op: Any, data: Any, dtype: Any = None, name: Any = None) -> None:
    """Reduce across partitions into one."""
    what = "tensor_partition_reduce"
    dst, data = checks.tile(what, "dst", dst, where=_SBUF), checks.tile(what, "data", data, where=_SBUF)
    label = getattr(op, "name", getattr(op, "__name__", ""))
    if label == "average":
        values = data.read32().mean(0, keepdims=True)
    else:
        found = operator(op)
        if found.name not in ("add", "maximum", "bitwise_or", "bitwise_and") or found.reduction is None:
            fault(f"{what}: op={op!r}", do="it has add, average, max, bitwise_or and bitwise_and")
        with quiet():
            values = found.reduction(data.read() if found.bitvec else data.read32(), axis=0)
    if dst.shape[0] != 1 or dst.size != data.per_partition:
        fault(f"{what}: {data.shape} reduces to [1, {data.per_partition}], dst is {dst.shape}")
    dst.write(np.asarray(values).reshape(dst.shape))
    session.core().ledger.compute("gpsimd", what, data.per_partition)


def local_gather(
    dst: Any,
    src_buffer: Any,
    index: Any,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
    dtype: Any = None,
    name: Any = None,
) -> None:
    """Gather within every 16 partitions: their indices, read partition first, pick free positions for all 16."""
    what = "local_gather"
    dst, src_buffer, index = (
        checks.tile(what, label, one, where=_SBUF)
        for label, one in (("dst", dst), ("src_buffer", src_buffer), ("index", index))
    )
    partitions = src_buffer.shape[0]
    if index.shape[0] != partitions or partitions % _CORE:
        fault(f"{what}: src_buffer {src_buffer.shape} and index {index.shape} need equal partitions, a multiple of 16")
    if num_elem_per_idx not in (1, 2, 4, 8, 16, 32) or str(index.dtype) != "uint16":
        fault(
            f"{what}: {num_elem_per_idx} elements for each index of {index.dtype!r}", do="1 to 32, a power of 2; uint16"
        )
    count = index.per_partition * _CORE if num_valid_indices is None else int(num_valid_indices)
    if count > min(index.per_partition * _CORE, 4096) or dst.per_partition != count * num_elem_per_idx:
        fault(f"{what}: {count} indices of {num_elem_per_idx} elements into {dst.shape}")
    source = src_buffer.read().reshape(partitions, -1)
    table = index.read().reshape(partitions, -1).astype(np.int64)
    out = np.empty((partitions, count * num_elem_per_idx), source.dtype)
    for first in range(0, partitions, _CORE):
        flat = table[first : first + _CORE].T.reshape(-1)[:count]
        lanes = (flat[:, None] + np.arange(num_elem_per_idx)).reshape(-1)
        if lanes.size and lanes.max() >= source.shape[1]:
            fault(f"{what}: index {int(lanes.max())} is out of range for {source.shape[1]} elements a partition")
        out[first : first + _CORE] = source[first : first + _CORE][:, lanes]
    dst.write(out.reshape(dst.shape))
    session.core().ledger.compute("gpsimd", what, dst.per_partition)


def nc_n_gather(dst: Any, data: Any, indices: Any, dtype: Any = None, name: Any = None) -> None:
    """Gather within each partition: dst[p, i] = data[p, indices[p, i]] over flattened free dimensions."""
    what = "nc_n_gather"
    dst, data, indices = (
        checks.tile(what, label, one, where=_SBUF)
        for label, one in (("dst", dst), ("data", data), ("indices", indices))
    )
    if str(indices.dtype) != "uint32" and not session.core().launch.legacy:
        fault(f"{what}: indices are {indices.dtype!r}, and must be uint32")
    checks.same_tile(what, dst, indices=indices)
    values = data.read().reshape(data.shape[0], -1)
    at = indices.read().reshape(data.shape[0], -1).astype(np.int64)
    if at.size and (at.min() < 0 or at.max() >= values.shape[1]):
        fault(f"{what}: an index is out of range for {values.shape[1]} elements a partition")
    dst.write(np.take_along_axis(values, at, 1).reshape(dst.shape))
    session.core().ledger.compute("gpsimd", what, dst.per_partition)


def sequence_bounds(dst: Any, segment_ids: Any, dtype: Any = None, name: Any = None) -> None:
    """Write, for each element of a packed row, where its segment starts and ends; padding (id 0) gets n and -1."""
    what = "sequence_bounds"
    dst = checks.tile(what, "dst", dst, where=_SBUF)
    segment_ids = checks.tile(what, "segment_ids", segment_ids, where=_SBUF)
    if segment_ids.shape[0] != 1 or dst.size != 2 * segment_ids.size:
        fault(f"{what}: segment ids {segment_ids.shape} into {dst.shape}", do="[1, n] into [1, 2, n]")
    ids = segment_ids.read().reshape(-1).astype(np.int64)
    n = len(ids)
    starts, ends = np.full(n, n, np.int64), np.full(n, -1, np.int64)
    edges = np.flatnonzero(np.diff(ids, prepend=ids[0] - 1, append=ids[-1] + 1))
    for first, last in itertools.pairwise(edges):
        if ids[first] != 0:
            starts[first:last], ends[first:last] = first, last
    dst.write(np.stack([starts, ends]).reshape(dst.shape))
    session.core().ledger.compute("gpsimd", what, dst.per_partition)


def nonzero_with_count(
    dst: Any, src: Any, index_offset: int = 0, padding_val: int = -1, dtype: Any = None, name: Any = None
) -> None:
    """Write the positions of nonzero elements, padding, and their count; in partitions 0, 16, ..., 112 only."""
    what = "nonzero_with_count"
    checks.needs(what, nc_version.gen3)
    dst, src = checks.tile(what, "dst", dst, where=_SBUF), checks.tile(what, "src", src, where=_SBUF)
    if dst.shape[0] != src.shape[0] or dst.per_partition != src.per_partition + 1:
        fault(f"{what}: src {src.shape} into dst {dst.shape}", do="dst has one element a partition more")
    if str(dst.dtype) != "int32" or str(src.dtype) not in ("float32", "int32"):
        fault(f"{what}: from {src.dtype!r} to {dst.dtype!r}", do="from float32 or int32 to int32")
    out = dst.read().reshape(dst.shape[0], -1).copy()
    values = src.read().reshape(src.shape[0], -1)
    for row in range(0, src.shape[0], _CORE):
        found = np.flatnonzero(values[row]) + int(index_offset)
        out[row] = int(padding_val)
        out[row, : len(found)] = found
        out[row, -1] = len(found)
    dst.write(out.reshape(dst.shape))
    session.core().ledger.compute("gpsimd", what, dst.per_partition)


def topk(val_dst: Any, idx_dst: Any, src: Any, n: int, name: Any = None) -> None:
    """Find the K largest of the `n` values that 16 partitions hold column by column, ascending, with positions."""
    what = "topk"
    val_dst, idx_dst, src = (
        checks.tile(what, label, one, where=_SBUF)
        for label, one in (("val_dst", val_dst), ("idx_dst", idx_dst), ("src", src))
    )
    k = val_dst.per_partition
    if not 8 <= n < 65536 or not 1 <= k <= n or src.shape[0] % _CORE or src.per_partition * _CORE < n:
        fault(f"{what}: the {k} largest of {n} values in {src.shape}")
    if (str(val_dst.dtype), str(idx_dst.dtype), str(src.dtype)) != ("bfloat16", "uint32", "bfloat16"):
        fault(
            f"{what}: from {src.dtype!r} to {val_dst.dtype!r} and {idx_dst.dtype!r}",
            do="bfloat16, and uint32 positions",
        )
    values = src.read32().reshape(src.shape[0], -1)
    best, places = np.empty((src.shape[0], k), np.float32), np.empty((src.shape[0], k), np.int64)
    for first in range(0, src.shape[0], _CORE):
        snake = values[first : first + _CORE].T.reshape(-1)[:n]
        order = np.argsort(-snake, kind="stable")[:k][::-1]
        best[first : first + _CORE], places[first : first + _CORE] = snake[order], order
    val_dst.write(best.reshape(val_dst.shape))
    idx_dst.write(places.reshape(idx_dst.shape))
    session.core().ledger.compute("gpsimd", what, 4 * n + k)
