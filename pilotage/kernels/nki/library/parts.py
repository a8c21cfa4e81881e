"""What several kernels do: tiles from HBM, transposes, products of rows with weights as Hugging Face stores them.

A matrix product contracts over partitions. Rows [tokens, D] and weights [out, D] both have D as their free dimension,
so both go through the tensor engine's transpose first.
"""

from __future__ import annotations

from typing import Any

from pilotage.kernels.nki.frontend import nisa, nl

P = 128  # partitions, and the widest stationary matrix
FREE = 512  # the widest moving matrix, one PSUM bank of float32


def spans(total: int, step: int) -> list[tuple[int, int]]:
    """Cut `total` into (start, length) pieces of at most `step`."""
    return [(start, min(step, total - start)) for start in range(0, total, step)]


def load(src: Any, shape: tuple[int, ...]) -> Any:
    """Bring a view of HBM into a new SBUF tile."""
    tile = nl.ndarray(shape, dtype=src.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=src)
    return tile


def spread(vector: Any, rows: int, start: int, count: int) -> Any:
    """Bring `count` elements of a vector in HBM into every one of `rows` partitions."""
    return load(vector.ap(pattern=[[0, rows], [1, count]], offset=start), (rows, count))


def cast(tile: Any, dtype: Any) -> Any:
    """Copy a tile into another type."""
    out = nl.ndarray(tile.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=out, src=tile)
    return out


def transposed(tile: Any) -> Any:
    """Transpose a tile of at most 128 by 128, back into SBUF."""
    rows, columns = tile.shape
    flipped = nl.ndarray((columns, rows), dtype=tile.dtype, buffer=nl.psum)
    nisa.nc_transpose(dst=flipped, data=tile)
    out = nl.ndarray((columns, rows), dtype=tile.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=out, src=flipped)
    return out


def columns(tile: Any, width: int) -> list[Any]:
    """Transpose a tile [rows, width] piece by piece: one [<=128, rows] for each 128 columns."""
    return [transposed(tile[:, start : start + count]) for start, count in spans(width, P)]


def weight_columns(weight: Any, first: int, count: int) -> list[Any]:
    """Bring rows `first` to `first + count` (at most 512) of weight [out, D] in as [<=128 of D, count] pieces."""
    width = weight.shape[1]
    pieces = [nl.ndarray((inner, count), dtype=weight.dtype, buffer=nl.sbuf) for _, inner in spans(width, P)]
    for start, rows in spans(count, P):
        block = load(weight[first + start : first + start + rows, :], (rows, width))
        for piece, (at, inner) in zip(pieces, spans(width, P), strict=True):
            flipped = nl.ndarray((inner, rows), dtype=weight.dtype, buffer=nl.psum)
            nisa.nc_transpose(dst=flipped, data=block[:, at : at + inner])
            nisa.tensor_copy(dst=piece[:, start : start + rows], src=flipped)
    return pieces


def product(left: list[Any], right: list[Any]) -> Any:
    """Sum left[i].T @ right[i] over the pieces, in PSUM: [rows of left, columns of right] float32."""
    rows, count = left[0].shape[1], right[0].shape[1]
    out = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.psum)
    for at in range(len(left)):
        nisa.nc_matmul(dst=out, stationary=left[at], moving=right[at], accumulate=at > 0)
    return out


def rounded(sums: Any, bias: Any, first: int, dtype: Any) -> Any:
    """Bring a product out of PSUM in `dtype`, its bias (in HBM, from element `first` on) added in float32."""
    rows, count = sums.shape
    out = nl.ndarray((rows, count), dtype=dtype, buffer=nl.sbuf)
    if bias is None:
        nisa.tensor_copy(dst=out, src=sums)
    else:
        nisa.tensor_tensor(dst=out, data1=spread(bias, rows, first, count), data2=sums, op=nl.add)
    return out
