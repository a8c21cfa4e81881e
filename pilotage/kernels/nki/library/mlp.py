"""The gated MLP in one kernel: what lies between its products never leaves the chip."""

from __future__ import annotations

from typing import Any

from pilotage.kernels.nki.frontend import jit, nisa, nl
from pilotage.kernels.nki.library.parts import FREE, P, columns, load, product, rounded, spans, weight_columns

ACTIVATIONS = {"silu": nl.silu, "gelu": nl.gelu, "gelu_pytorch_tanh": nl.gelu_apprx_tanh, "relu": nl.relu}


@jit
def mlp(x: Any, gate_up_weight: Any, down_weight: Any, gate_up_bias: Any, down_bias: Any, activation: str) -> Any:
    """Compute down(activation(gate(x)) * up(x)).

    Args:
        x: [T, D].
        gate_up_weight: [2F, D], gate's rows first.
        down_weight: [D, F].
        gate_up_bias: [2F] or None.
        down_bias: [D] or None.
        activation: a key of `ACTIVATIONS`.

    Returns:
        [T, D] in x's dtype.

    Numerics: each product as `linear`; gate, up, the activation and their product rounded to x's dtype.
    """
    tokens, width = x.shape
    inner = down_weight.shape[1]
    out = nl.ndarray((tokens, width), dtype=x.dtype, buffer=nl.shared_hbm)
    for start, rows in spans(tokens, P):
        left = columns(load(x[start : start + rows, :], (rows, width)), width)
        hidden = nl.ndarray((rows, inner), dtype=x.dtype, buffer=nl.sbuf)
        for first, count in spans(inner, FREE):
            gate = rounded(product(left, weight_columns(gate_up_weight, first, count)), gate_up_bias, first, x.dtype)
            above = inner + first
            up = rounded(product(left, weight_columns(gate_up_weight, above, count)), gate_up_bias, above, x.dtype)
            nisa.activation(dst=gate, op=ACTIVATIONS[activation], data=gate)
            nisa.tensor_tensor(dst=hidden[:, first : first + count], data1=gate, data2=up, op=nl.multiply)
        turned = columns(hidden, inner)
        for first, count in spans(width, FREE):
            result = rounded(product(turned, weight_columns(down_weight, first, count)), down_bias, first, x.dtype)
            nisa.dma_copy(dst=out[start : start + rows, first : first + count], src=result)
    return out
