"""RMS normalisation."""

from __future__ import annotations

from typing import Any

from pilotage.kernels.nki.frontend import jit, nisa, nl
from pilotage.kernels.nki.library.parts import P, load, spans, spread


@jit
def rms_norm(x: Any, weight: Any, eps: float, unit_offset: bool, round_once: bool) -> Any:
    """Scale each row to unit root mean square, then by the weight.

    Args:
        x: [T, D].
        weight: [D].
        eps: added to the mean square.
        unit_offset: multiply by (1 + weight).
        round_once: apply the weight in float32.

    Returns:
        [T, D] in x's dtype.

    Numerics: sum of squares and normalisation in float32; otherwise rounded as `functional.rms_norm` does.
    """
    tokens, width = x.shape
    out = nl.ndarray((tokens, width), dtype=x.dtype, buffer=nl.shared_hbm)
    once = unit_offset or round_once
    for start, rows in spans(tokens, P):
        scale = spread(weight, rows, 0, width)
        if unit_offset:
            shifted = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_scalar(dst=shifted, data=scale, op0=nl.add, operand0=1.0)
            scale = shifted
        tile = load(x[start : start + rows, :], (rows, width))
        squares = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf)
        inverse = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(
            dst=squares,
            op=nl.square,
            data=tile,
            reduce_op=nl.add,
            reduce_res=inverse,
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )
        nisa.tensor_scalar(dst=inverse, data=inverse, op0=nl.multiply, operand0=1.0 / width, op1=nl.add, operand1=eps)
        nisa.tensor_scalar(dst=inverse, data=inverse, op0=nl.rsqrt, operand0=0.0)
        normed = nl.ndarray((rows, width), dtype=nl.float32 if once else x.dtype, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=normed, data=tile, op0=nl.multiply, operand0=inverse)
        result = nl.ndarray((rows, width), dtype=x.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=result, data1=normed, data2=scale, op=nl.multiply)
        nisa.dma_copy(dst=out[start : start + rows, :], src=result)
    return out
