"""Attention on a GPU through torch's fused attention: static in shape, so that it stays inside a compiled graph.

Every page of the block table is read and masked, as in the definitions, but keys are not repeated for the query heads
that share them, and products run in the dtype of the cache. How far a graph reads is bounded by
`decode_context_length_buckets`. Untested on hardware; the tests run these functions on the CPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pilotage.functional.attention import gather_pages, real_tokens, sees, sees_packed
from pilotage.functional.domain import Domain
from pilotage.functional.registry import register


def _attend(q_XNQH: Tensor, k_XSKH: Tensor, v_XSKH: Tensor, seen_XQS: Tensor, scale: float) -> Tensor:
    """Attend in every row X; a query that sees nothing gives zeros. Returns [X, N, Q, H]."""
    # A slot that nobody sees may hold NaN, and 0 * NaN is NaN.
    held_XS = seen_XQS.any(dim=1)
    keys, values = (torch.where(held_XS[:, :, None, None], x, 0).transpose(1, 2) for x in (k_XSKH, v_XSKH))
    blind_XQ = ~seen_XQS.any(dim=-1)
    mask = seen_XQS | blind_XQ[..., None]  # a softmax over nothing would be NaN
    out = F.scaled_dot_product_attention(q_XNQH, keys, values, attn_mask=mask[:, None], scale=scale, enable_gqa=True)
    return torch.where(blind_XQ[:, None, :, None], 0, out)


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
    """See `functional.attention.flash_attention`."""
    seen_TT = sees_packed(q, token_to_req, positions, query_start_loc, window)
    return _attend(q.transpose(0, 1)[None], k[None], v[None], seen_TT[None], scale)[0].transpose(0, 1)


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
    """See `functional.attention.segmented_attention`; all segments are read at once."""
    k_SKH, v_SKH = (gather_pages(cache, block_table, None).flatten(0, 1) for cache in (k_cache, v_cache))
    rows, keys = block_table.shape[0], block_table.shape[1] * k_cache.shape[2]
    at = torch.arange(keys, device=q.device).repeat(rows)
    owner = torch.arange(rows, device=q.device).repeat_interleave(keys)
    seen_TS = sees(positions[:, None], at[None, :], window) & (token_to_req[:, None] == owner[None, :])
    seen_TS = seen_TS & real_tokens(q, query_start_loc)[:, None]
    return _attend(q.transpose(0, 1)[None], k_SKH[None], v_SKH[None], seen_TS[None], scale)[0].transpose(0, 1)


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
    """See `functional.attention.attention_decode`."""
    k_TSKH, v_TSKH = (gather_pages(cache, block_table[token_to_req], None) for cache in (k_cache, v_cache))
    at = torch.arange(k_TSKH.shape[1], device=q.device)
    seen_TS = sees(positions[:, None], at[None, :], window) & real_tokens(q, query_start_loc)[:, None]
    return _attend(q[:, :, None], k_TSKH, v_TSKH, seen_TS[:, None], scale)[:, :, 0]


_NONE = (None,)
_PLAIN = {"softcap": _NONE, "sinks": _NONE}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PACKED = Domain(targets=("cuda",), dtypes=_DTYPES, one_dtype=("q", "k", "v"), options=_PLAIN)
_PAGED = Domain(
    targets=("cuda",),
    dtypes=_DTYPES,
    one_dtype=("q", "k_cache", "v_cache"),
    options={**_PLAIN, "k_scale": _NONE, "v_scale": _NONE},
)

register("flash_attention", "fused", flash_attention, domain=_PACKED, priority=10)
register("segmented_attention", "fused", segmented_attention, domain=_PAGED, priority=10)
register("attention_decode", "fused", attention_decode, domain=_PAGED, priority=10)
