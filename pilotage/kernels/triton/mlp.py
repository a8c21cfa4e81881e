"""The gated MLP in Triton: gate, up and the activation in one kernel, the product down in another."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
_TILE = {"ROWS": 16, "COLUMNS": 64, "INNER": 32}


@triton.jit
def _activated(x, KIND: tl.constexpr):
    if KIND == 0:
        x = x * tl.sigmoid(x)
    elif KIND == 1:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 2:  # 0.5 (1 + tanh(y)) is sigmoid(2 y)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        x = tl.where(x > 0.0, x, tl.where(x == x, 0.0, x))
    return x


@triton.jit
def _gate_up(
    x,
    weight,
    bias,
    out,
    num_rows,
    hidden,
    width,
    x_stride,
    weight_stride,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live, wide = rows < num_rows, columns < hidden
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, width, INNER):
        at = start + tl.arange(0, INNER)
        inside = at < width
        part = tl.load(
            x + rows[:, None].to(tl.int64) * x_stride + at[None, :], mask=live[:, None] & inside[None, :], other=0.0
        )
        where = weight + columns[:, None].to(tl.int64) * weight_stride + at[None, :]
        mask = wide[:, None] & inside[None, :]
        gate += tl.dot(part, tl.trans(tl.load(where, mask=mask, other=0.0)), input_precision="ieee")
        where += hidden.to(tl.int64) * weight_stride
        up += tl.dot(part, tl.trans(tl.load(where, mask=mask, other=0.0)), input_precision="ieee")
    if BIAS:
        gate += tl.load(bias + columns, mask=wide, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + hidden + columns, mask=wide, other=0.0).to(tl.float32)[None, :]
    result = (_activated(gate, KIND) * up).to(out.dtype.element_ty)
    tl.store(out + rows[:, None].to(tl.int64) * hidden + columns[None, :], result, mask=live[:, None] & wide[None, :])


@triton.jit
def _down(
    x,
    weight,
    bias,
    out,
    num_rows,
    width,
    hidden,
    weight_stride,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live, wide = rows < num_rows, columns < width
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, hidden, INNER):
        at = start + tl.arange(0, INNER)
        inside = at < hidden
        part = tl.load(
            x + rows[:, None].to(tl.int64) * hidden + at[None, :], mask=live[:, None] & inside[None, :], other=0.0
        )
        where = weight + columns[:, None].to(tl.int64) * weight_stride + at[None, :]
        factor = tl.load(where, mask=wide[:, None] & inside[None, :], other=0.0)
        total += tl.dot(part, tl.trans(factor), input_precision="ieee")
    if BIAS:
        total += tl.load(bias + columns, mask=wide, other=0.0).to(tl.float32)[None, :]
    result = total.to(out.dtype.element_ty)
    tl.store(out + rows[:, None].to(tl.int64) * width + columns[None, :], result, mask=live[:, None] & wide[None, :])


def mlp(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str,
) -> Tensor:
    """Run the gated MLP; the activation never leaves the registers of the product it belongs to.

    Numerics: sums, activation and gating in fp32; rounded to the tensors' dtype once between the two products and once
    at the end.
    """
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    gate_up, down = (w if w.stride(-1) == 1 else w.contiguous() for w in (gate_up_weight, down_weight))
    (count, width), hidden = rows.shape, down.shape[1]
    between = torch.empty((count, hidden), dtype=x.dtype, device=x.device)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _gate_up[(triton.cdiv(count, _TILE["ROWS"]), triton.cdiv(hidden, _TILE["COLUMNS"]))](
        rows,
        gate_up,
        gate_up_bias if gate_up_bias is not None else rows,
        between,
        count,
        hidden,
        width,
        rows.stride(0),
        gate_up.stride(0),
        BIAS=gate_up_bias is not None,
        KIND=ACTIVATIONS.index(activation),
        **_TILE,
    )
    _down[(triton.cdiv(count, _TILE["ROWS"]), triton.cdiv(width, _TILE["COLUMNS"]))](
        between,
        down,
        down_bias if down_bias is not None else rows,
        out,
        count,
        width,
        hidden,
        down.stride(0),
        BIAS=down_bias is not None,
        **_TILE,
    )
    return out
