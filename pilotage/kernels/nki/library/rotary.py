"""Rotary position embedding."""

from __future__ import annotations

from typing import Any

from pilotage.kernels.nki.frontend import jit, nisa, nl
from pilotage.kernels.nki.library.parts import P, load, spans


@jit
def rotary(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    """Rotate queries and keys; the two halves of the rotated channels form the pairs.

    Args:
        q: [T, N, H].
        k: [T, K, H].
        cos, sin: [T, R].

    Returns:
        q and k rotated.

    Numerics: every product and sum is rounded to the tensors' dtype, as in `functional.rotary`.
    """
    turned = []
    for x in (q, k):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        for start, rows in spans(x.shape[0], P):
            _rotate(x, out, cos, sin, start, rows)
        turned.append(out)
    return turned[0], turned[1]


def _rotate(x: Any, out: Any, cos: Any, sin: Any, start: int, rows: int) -> None:
    _, heads, size = x.shape
    width = cos.shape[1]
    half = width // 2
    tile = load(x[start : start + rows, :, :], (rows, heads, size))
    cosines, sines = (load(one[start : start + rows, :], (rows, width)) for one in (cos, sin))
    result = nl.ndarray((rows, heads, size), dtype=x.dtype, buffer=nl.sbuf)
    for mine, other, op in ((0, half, nl.subtract), (half, 0, nl.add)):
        straight = nl.ndarray((rows, heads, half), dtype=x.dtype, buffer=nl.sbuf)
        across = nl.ndarray((rows, heads, half), dtype=x.dtype, buffer=nl.sbuf)
        here, there = slice(mine, mine + half), slice(other, other + half)
        # The angles of a token serve all its heads: their stride over heads is 0.
        pattern = [[width, rows], [0, heads], [1, half]]
        cosine, sine = cosines.ap(pattern=pattern, offset=mine), sines.ap(pattern=pattern, offset=mine)
        nisa.tensor_tensor(dst=straight, data1=tile[:, :, here], data2=cosine, op=nl.multiply)
        nisa.tensor_tensor(dst=across, data1=tile[:, :, there], data2=sine, op=nl.multiply)
        nisa.tensor_tensor(dst=result[:, :, here], data1=straight, data2=across, op=op)
    if width < size:
        nisa.tensor_copy(dst=result[:, :, width:size], src=tile[:, :, width:size])
    nisa.dma_copy(dst=out[start : start + rows, :, :], src=result)
