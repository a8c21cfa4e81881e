"""Linear projection with weights as Hugging Face stores them: queries, keys and values, and attention's output."""

from __future__ import annotations

from typing import Any

from pilotage.kernels.nki.frontend import jit, nisa, nl
from pilotage.kernels.nki.library.parts import FREE, P, columns, load, product, rounded, spans, weight_columns


@jit
def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """Project x [T, D] by weight [F, D], and add bias [F]: [T, F] in x's dtype.

    Weights are brought in once for each 512 outputs; rows once for each 128 of them and each 512 outputs.

    Numerics: products of the given types, sums and bias in float32, rounded once.
    """
    tokens, width = x.shape
    outputs = weight.shape[0]
    out = nl.ndarray((tokens, outputs), dtype=x.dtype, buffer=nl.shared_hbm)
    for first, count in spans(outputs, FREE):
        right = weight_columns(weight, first, count)
        for start, rows in spans(tokens, P):
            left = columns(load(x[start : start + rows, :], (rows, width)), width)
            result = rounded(product(left, right), bias, first, x.dtype)
            nisa.dma_copy(dst=out[start : start + rows, first : first + count], src=result)
    return out
