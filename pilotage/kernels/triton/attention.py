"""Attention in Triton: over packed new tokens, and over the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_QUERIES, _KEYS = 32, 32  # a tile of packed attention
_LEAST = 16  # of each side of a product on the tensor cores


@triton.jit
def _capped(logits, cap, CAPPED: tl.constexpr):
    if CAPPED:
        logits = cap * (2.0 * tl.sigmoid(2.0 * logits / cap) - 1.0)
    return logits


@triton.jit
def _packed(
    q,
    k,
    v,
    out,
    sinks,
    owners,
    positions,
    starts,
    tokens,
    requests,
    group,
    head_size,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    scale,
    window,
    cap,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    head = tl.program_id(1)
    kv_head = head // group
    first = tl.program_id(0) * QUERIES
    rows = first + tl.arange(0, QUERIES)
    real = tl.load(starts + requests)
    live = rows < real
    channels = tl.arange(0, SIZE)
    wide = channels < head_size
    queries = tl.load(
        q + rows[:, None].to(tl.int64) * q_token + head * q_head + channels[None, :],
        mask=live[:, None] & wide[None, :],
        other=0.0,
    )
    owner = tl.load(owners + rows, mask=live, other=-1)
    position = tl.load(positions + rows, mask=live, other=0)
    top = tl.full((QUERIES,), -1e30, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    values = tl.zeros((QUERIES, SIZE), tl.float32)
    # Tokens of a request lie together and in order: no key before the first one's request or after the last query.
    low = tl.load(starts + tl.load(owners + first, mask=first < real, other=0))
    high = tl.minimum(first + QUERIES, real)
    for start in range(low, high, KEYS):
        at = start + tl.arange(0, KEYS)
        there = at < high
        keys = tl.load(
            k + at[:, None].to(tl.int64) * k_token + kv_head * k_head + channels[None, :],
            mask=there[:, None] & wide[None, :],
            other=0.0,
        )
        key_owner = tl.load(owners + at, mask=there, other=-2)
        key_position = tl.load(positions + at, mask=there, other=0)
        visible = (owner[:, None] == key_owner[None, :]) & (key_position[None, :] <= position[:, None])
        if WINDOWED:
            visible &= key_position[None, :] > position[:, None] - window
        logits = _capped(tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale, cap, CAPPED)
        logits = tl.where(visible, logits, -1e30)
        above = tl.maximum(top, tl.max(logits, axis=1))
        weights = tl.where(visible, tl.exp(logits - above[:, None]), 0.0)
        shrink = tl.exp(top - above)
        cached = tl.load(
            v + at[:, None].to(tl.int64) * v_token + kv_head * v_head + channels[None, :],
            mask=there[:, None] & wide[None, :],
            other=0.0,
        )
        product = tl.dot(weights.to(cached.dtype), cached, input_precision="ieee")
        total = total * shrink + tl.sum(weights, axis=1)
        values = values * shrink[:, None] + product
        top = above
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        above = tl.maximum(top, sink)
        total = total * tl.exp(top - above) + tl.exp(sink - above)
        values = values * tl.exp(top - above)[:, None]
    values = values / tl.where(total == 0.0, 1.0, total)[:, None]
    heads = tl.num_programs(1)
    tl.store(
        out + (rows[:, None].to(tl.int64) * heads + head) * head_size + channels[None, :],
        values.to(out.dtype.element_ty),
        mask=(rows < tokens)[:, None] & wide[None, :],
    )


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    token_to_req: Tensor,
    positions: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend among packed new tokens; one program a tile of queries and head.

    Numerics: products and sums in fp32, softmax in fp32; its weights are rounded to the tensors' dtype before they
    meet the values.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    tokens, heads, head_size = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _packed[(triton.cdiv(tokens, _QUERIES), heads)](
        q,
        k,
        v,
        out,
        sinks if sinks is not None else q,
        token_to_req,
        positions,
        query_start_loc,
        tokens,
        query_start_loc.shape[0] - 1,
        heads // k.shape[1],
        head_size,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        scale,
        window or 0,
        softcap or 1.0,
        WINDOWED=window is not None,
        CAPPED=softcap is not None,
        SINKS=sinks is not None,
        QUERIES=_QUERIES,
        KEYS=_KEYS,
        SIZE=max(_LEAST, triton.next_power_of_2(head_size)),
    )
    return out


@triton.jit
def _paged(
    q,
    k_cache,
    v_cache,
    out,
    sinks,
    table,
    owners,
    positions,
    starts,
    requests,
    heads,
    group,
    head_size,
    slots,
    q_token,
    q_head,
    page_stride,
    head_stride,
    slot_stride,
    table_stride,
    scale,
    window,
    cap,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    token, kv_head = tl.program_id(0), tl.program_id(1)
    members = tl.arange(0, GROUP)
    ours = members < group
    channels = tl.arange(0, SIZE)
    wide = channels < head_size
    inside = ours[:, None] & wide[None, :]
    source = q + token.to(tl.int64) * q_token + (kv_head * group + members[:, None]) * q_head + channels[None, :]
    queries = tl.load(source, mask=inside, other=0.0)
    top = tl.full((GROUP,), -1e30, tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    values = tl.zeros((GROUP, SIZE), tl.float32)
    live = token < tl.load(starts + requests)
    request = tl.load(owners + token, mask=live, other=0)
    position = tl.load(positions + token, mask=live, other=-1)
    first = 0
    if WINDOWED:
        first = tl.maximum(position - window + 1, 0) // slots
    offsets = tl.arange(0, SLOTS)
    for number in range(first, (position + slots) // slots):
        page = tl.load(table + request * table_stride + number).to(tl.int64)
        at = number * slots + offsets
        visible = (offsets < slots) & (at <= position)
        if WINDOWED:
            visible &= at > position - window
        where = page * page_stride + kv_head * head_stride + offsets[:, None] * slot_stride + channels[None, :]
        # What is not visible may hold anything, NaN included: it is not read.
        seen = visible[:, None] & wide[None, :]
        keys = tl.load(k_cache + where, mask=seen, other=0.0)
        cached = tl.load(v_cache + where, mask=seen, other=0.0)
        logits = _capped(tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale, cap, CAPPED)
        logits = tl.where(visible[None, :], logits, -1e30)
        above = tl.maximum(top, tl.max(logits, axis=1))
        weights = tl.where(visible[None, :], tl.exp(logits - above[:, None]), 0.0)
        shrink = tl.exp(top - above)
        total = total * shrink + tl.sum(weights, axis=1)
        product = tl.dot(weights.to(cached.dtype), cached, input_precision="ieee")
        values = values * shrink[:, None] + product
        top = above
    if SINKS:
        sink = tl.load(sinks + kv_head * group + members, mask=ours, other=0.0).to(tl.float32)
        above = tl.maximum(top, sink)
        total = total * tl.exp(top - above) + tl.exp(sink - above)
        values = values * tl.exp(top - above)[:, None]
    values = values / tl.where(total == 0.0, 1.0, total)[:, None]
    target = out + (token.to(tl.int64) * heads + kv_head * group + members[:, None]) * head_size + channels[None, :]
    tl.store(target, values.to(out.dtype.element_ty), mask=inside)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    block_table: Tensor,
    token_to_req: Tensor,
    positions: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend to the paged cache; one program a token and key head, page by page, those outside the window not read.

    Numerics: as `flash_attention`.
    """
    q = q if q.stride(-1) == 1 else q.contiguous()
    tokens, heads, head_size = q.shape
    kv_heads, slots = k_cache.shape[1:3]
    group = heads // kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _paged[(tokens, kv_heads)](
        q,
        k_cache,
        v_cache,
        out,
        sinks if sinks is not None else q,
        block_table,
        token_to_req,
        positions,
        query_start_loc,
        query_start_loc.shape[0] - 1,
        heads,
        group,
        head_size,
        slots,
        q.stride(0),
        q.stride(1),
        *k_cache.stride()[:3],
        block_table.stride(0),
        scale,
        window or 0,
        softcap or 1.0,
        WINDOWED=window is not None,
        CAPPED=softcap is not None,
        SINKS=sinks is not None,
        GROUP=max(_LEAST, triton.next_power_of_2(group)),
        SLOTS=max(_LEAST, triton.next_power_of_2(slots)),
        SIZE=max(_LEAST, triton.next_power_of_2(head_size)),
    )
    return out
