"""RMS normalisation and rotary embedding in Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(
    x,
    weight,
    out,
    width,
    row_stride,
    eps,
    UNIT_OFFSET: tl.constexpr,
    ROUND_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    values = tl.load(x + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    normed = values * (1.0 / tl.sqrt(tl.sum(values * values, axis=0) / width + eps))
    if UNIT_OFFSET:
        factor += 1.0
    elif not ROUND_ONCE:
        normed = normed.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + at, (normed * factor).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, unit_offset: bool = False, round_once: bool = False) -> Tensor:
    """Normalise rows; one program a row, the whole row in registers.

    Numerics: as the definition: fp32, rounded where it rounds; the sum in another order.
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rms_norm[(rows.shape[0],)](
        rows,
        weight.contiguous(),
        out,
        rows.shape[1],
        rows.stride(0),
        eps,
        UNIT_OFFSET=unit_offset,
        ROUND_ONCE=round_once,
        BLOCK=triton.next_power_of_2(rows.shape[1]),
    )
    return out


@triton.jit
def _rotate(
    x,
    cos,
    sin,
    out,
    heads,
    head_size,
    half,
    token_stride,
    head_stride,
    table_stride,
    BLOCK: tl.constexpr,
) -> None:
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < half
    source = x + token * token_stride + head * head_stride
    target = out + (token * heads + head) * head_size
    first = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half + at, mask=inside, other=0.0).to(tl.float32)
    table = token * table_stride
    cos_first = tl.load(cos + table + at, mask=inside, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + table + half + at, mask=inside, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + table + at, mask=inside, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + table + half + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + at, (first * cos_first - second * sin_first).to(out.dtype.element_ty), mask=inside)
    tl.store(target + half + at, (second * cos_second + first * sin_second).to(out.dtype.element_ty), mask=inside)
    for start in range(2 * half, head_size, BLOCK):  # channels that are not rotated
        rest = start + tl.arange(0, BLOCK)
        tl.store(target + rest, tl.load(source + rest, mask=rest < head_size), mask=rest < head_size)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys; one program a token and head.

    Numerics: products and sum in fp32, rounded once; the definition rounds each product.
    """
    tables = [table.reshape(-1, table.shape[-1]).contiguous() for table in (cos, sin)]
    return _rotated(q, *tables), _rotated(k, *tables)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows: Any = x.reshape(-1, *x.shape[-2:])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    half = cos.shape[-1] // 2
    _rotate[(rows.shape[0], rows.shape[1])](
        rows,
        cos,
        sin,
        out,
        rows.shape[1],
        rows.shape[2],
        half,
        rows.stride(0),
        rows.stride(1),
        cos.stride(0),
        BLOCK=triton.next_power_of_2(half),
    )
    return out
