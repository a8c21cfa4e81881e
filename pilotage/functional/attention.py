"""Attention over packed tokens and a paged cache: the definitions.

Layout, everywhere: tokens of all requests lie one after another (`[T, heads, H]`); the cache holds pages
`[P, K, C, H]`; a request's page ids are a row of `block_table`. `token_to_req` names each token's row; tokens from
`query_start_loc[-1]` on are padding and their row is not looked at.
A query sees the keys of its own request at positions `<=` its own and, with a window W, `>` its own minus W. Rows of
padding come out finite and meaningless.

The definitions are plain and static in shape: every page that a request could own is read and masked. `functional.sdpa`
holds the implementations that read only what is live.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pilotage.functional.registry import operator

KV_8BIT = torch.float8_e4m3fn
_MASKED = -1e30  # finite: a row with no visible key must not become NaN


@operator
def write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, *, slot_mapping: Tensor) -> None:
    """Write new keys and values into their slots, in place.

    Args:
        k_cache, v_cache: [P, K, C, H]; changed.
        k, v: [T, K, H].
        slot_mapping: [T] int64, page * C + offset; -1 is padding and is never written.

    Numerics: exact copies, cast to the cache's dtype.
    """
    _write(((k_cache, k), (v_cache, v)), slot_mapping)


@operator
def write_rows(cache: Tensor, rows: Tensor, *, slot_mapping: Tensor) -> None:
    """Write new rows, each a key and a value at once, into their slots, in place.

    Args:
        cache: [P, K, C, H]; changed.
        rows: [T, K, H].
        slot_mapping: [T] int64, page * C + offset; -1 is padding and is never written.

    Numerics: exact copies, cast to the cache's dtype.
    """
    _write(((cache, rows),), slot_mapping)


def _write(pairs: tuple[tuple[Tensor, Tensor], ...], slot_mapping: Tensor) -> None:
    """Write new rows [T, K, H] into the slots of caches of one shape."""
    block_size, num_heads = pairs[0][0].shape[2], pairs[0][1].shape[1]
    written = slot_mapping >= 0
    # Shapes are static, so padding has to write something: it repeats the first real write, or, where there is none,
    # puts back what slot 0 holds.
    first = torch.argmax(written.to(torch.int32))
    source = torch.where(written, torch.arange(slot_mapping.shape[0], device=slot_mapping.device), first)
    slots = slot_mapping[source].clamp(min=0)
    heads = torch.arange(num_heads, device=slots.device)[None, :]
    page, offset = (slots // block_size)[:, None], (slots % block_size)[:, None]
    any_written = written.any()
    for cache, new in pairs:
        rows = torch.where(any_written, new[source].to(cache.dtype), cache[page, heads, offset])
        cache.index_put_((page, heads, offset), rows)


@operator
def quantise_kv(x: Tensor, scale: Tensor) -> Tensor:
    """Round keys or values to the 8-bit floats of a cache.

    Args:
        x: [T, K, H].
        scale: one fp32 number of the layer; what is read from the cache is multiplied by it.

    Returns:
        [T, K, H] float8_e4m3fn.

    Numerics: x / scale in fp32, bounded to the largest number of the format, rounded once to the nearest.
    """
    largest = torch.finfo(KV_8BIT).max
    return (x.float() / scale).clamp(-largest, largest).to(KV_8BIT)


@operator
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
    """Attend among the new tokens only: prefill of requests that have nothing cached.

    Args:
        q: [T, N, H].
        k, v: [T, K, H], N a multiple of K; head n reads key head n // (N / K).
        token_to_req: [T] int32, the request of each token.
        positions: [T] int32.
        query_start_loc: [B + 1] int32, where each request's tokens start; the last entry is where padding starts.
        scale: factor on q.k.
        window: number of keys a query sees, itself included; None for all.
        softcap: logits become softcap * tanh(logits / softcap).
        sinks: [N], an extra logit per head that takes part in the softmax and carries no value.

    Returns:
        [T, N, H] in q's dtype.

    Numerics: products, softmax and sum in fp32, rounded to q's dtype at the end.
    """
    visible_TT = sees_packed(q, token_to_req, positions, query_start_loc, window)
    state = _accumulate(None, q, k[None], v[None], visible_TT[None], scale, softcap)
    return _finish(state, sinks, q)


@operator
def segmented_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    block_table: Tensor,
    token_to_req: Tensor,
    positions: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_segment_size: int,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Attend from a chunk of each request to everything it has cached, the chunk itself included.

    Args:
        q: [T, N, H].
        k_cache, v_cache: [P, K, C, H]; the chunk's own keys and values are already written.
        block_table: [B, M] int32.
        token_to_req: [T] int32, the request of each token.
        positions: [T] int32.
        query_start_loc: [B + 1] int32.
        seq_lens: [B] int32, tokens cached after this step.
        scale, window, softcap, sinks: as in `flash_attention`.
        kv_segment_size: keys of a request that are read at a time, a multiple of C; 0 for all at once.
        k_scale, v_scale: what cached numbers are multiplied by when they are read, in fp32; None for nothing. See
            `quantise_kv`.

    Returns:
        [T, N, H] in q's dtype.

    Numerics: fp32; segments are combined by the running maximum and sum (Milakov and Gimelshein, 2018).
    """
    block_size = k_cache.shape[2]
    num_reqs, num_pages = block_table.shape
    pages_at_a_time = kv_segment_size // block_size or num_pages
    state = None
    for first in range(0, num_pages, pages_at_a_time):
        pages = block_table[:, first : first + pages_at_a_time]
        k_SKH, v_SKH = (
            gather_pages(cache, pages, factor).flatten(0, 1)
            for cache, factor in ((k_cache, k_scale), (v_cache, v_scale))
        )
        at = torch.arange(pages.shape[1] * block_size, device=q.device) + first * block_size
        owner = torch.arange(num_reqs, device=q.device).repeat_interleave(at.shape[0])
        visible_TS = sees(positions[:, None], at.repeat(num_reqs)[None, :], window)
        visible_TS = visible_TS & (token_to_req[:, None] == owner[None, :]) & real_tokens(q, query_start_loc)[:, None]
        state = _accumulate(state, q, k_SKH[None], v_SKH[None], visible_TS[None], scale, softcap)
    assert state is not None
    return _finish(state, sinks, q)


@operator
def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    block_table: Tensor,
    token_to_req: Tensor,
    positions: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Attend from one or a few tokens of each request to everything it has cached, the token itself included.

    Args and returns: as `segmented_attention`, with T a small multiple of B.

    Numerics: products, softmax and sum in fp32, rounded to q's dtype at the end.
    """
    pages_TM = block_table[token_to_req]
    k_TSKH, v_TSKH = gather_pages(k_cache, pages_TM, k_scale), gather_pages(v_cache, pages_TM, v_scale)
    at = torch.arange(k_TSKH.shape[1], device=q.device)
    visible_TS = sees(positions[:, None], at[None, :], window) & real_tokens(q, query_start_loc)[:, None]
    state = _accumulate(None, q[:, None], k_TSKH, v_TSKH, visible_TS[:, None], scale, softcap)
    return _finish(state, sinks, q[:, None])[:, 0]


def sees_packed(
    q: Tensor, token_to_req: Tensor, positions: Tensor, query_start_loc: Tensor, window: int | None
) -> Tensor:
    """Tell which new tokens each new token sees, [T, T]; see `flash_attention`."""
    visible_TT = sees(positions[:, None], positions[None, :], window)
    real = real_tokens(q, query_start_loc)
    return visible_TT & (token_to_req[:, None] == token_to_req[None, :]) & real[:, None] & real[None, :]


def real_tokens(q: Tensor, query_start_loc: Tensor) -> Tensor:
    """Tell which of the tokens are no padding, [T]."""
    return torch.arange(q.shape[0], device=q.device) < query_start_loc[-1]


def sees(query_at: Tensor, key_at: Tensor, window: int | None) -> Tensor:
    """Tell which positions a query of the same request sees from its own."""
    before = key_at <= query_at
    return before if window is None else before & (key_at > query_at - window)


def gather_pages(cache: Tensor, pages: Tensor, scale: Tensor | None) -> Tensor:
    """Lay pages [rows, M] of [P, K, C, H] out as [rows, M * C, K, H], multiplied by the scale."""
    rows = cache[pages].transpose(2, 3).flatten(1, 2)
    return rows if scale is None else rows.float() * scale


State = tuple[Tensor, Tensor, Tensor]


def _accumulate(
    state: State | None, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float | None
) -> State:
    """Add keys to a running softmax.

    Args:
        q: [..., Q, N, H], or [Q, N, H] against keys [1, S, K, H].
        k, v: [X, S, K, H].
        visible: [X, Q, S].

    Returns:
        running maximum [X, N, Q], sum of exponentials [X, N, Q], weighted values [X, N, Q, H], fp32.
    """
    group = q.shape[-2] // k.shape[-2]
    q_XNQH = (q if q.ndim == 4 else q[None]).transpose(1, 2).float()
    k_XNSH = k.transpose(1, 2).repeat_interleave(group, dim=1).float()
    # A masked slot may hold anything, NaN included, and 0 * NaN is NaN: values are masked as well as logits.
    seen_XS = visible.any(dim=1)
    v = torch.where(seen_XS[:, :, None, None], v, 0)
    v_XNSH = v.transpose(1, 2).repeat_interleave(group, dim=1).float()
    logits = torch.matmul(q_XNQH, k_XNSH.transpose(-1, -2)) * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = torch.where(visible[:, None], logits, _MASKED)
    top = logits.amax(-1)
    if state is not None:
        top = torch.maximum(top, state[0])
    weights = torch.where(visible[:, None], torch.exp(logits - top[..., None]), 0.0)
    total, values = weights.sum(-1), torch.matmul(weights, v_XNSH)
    if state is not None:
        shrink = torch.exp(state[0] - top)
        total, values = total + state[1] * shrink, values + state[2] * shrink[..., None]
    return top, total, values


def _finish(state: State, sinks: Tensor | None, q: Tensor) -> Tensor:
    """Normalise to q's shape and dtype."""
    top, total, values = state
    if sinks is not None:
        sink = sinks.float()[None, :, None]
        above = torch.maximum(top, sink)
        shrink = torch.exp(top - above)
        total, values = total * shrink + torch.exp(sink - above), values * shrink[..., None]
    out = values / torch.where(total == 0, 1.0, total)[..., None]
    return out.transpose(1, 2).reshape(q.shape).to(q.dtype)
