"""Attention on the CPU, one request at a time, reading only live pages.

The same results as the definitions in `functional.attention` to rounding; cost follows the tokens that are cached and
inside the window, not the size of the block table. Each is one opaque operation in a compiled graph, because how much
it reads depends on values. No gradient: under autograd the definition runs.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from pilotage.functional.attention import KV_8BIT  # and the operators exist before implementations of them register
from pilotage.functional.call import Call
from pilotage.functional.domain import Domain
from pilotage.functional.registry import picking, register

_QUERIES_AT_A_TIME = 256  # with a window, keys outside it are skipped in steps of this many queries
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_LIBRARY = torch.library.Library("pilotage", "FRAGMENT")
_LIBRARY.define(
    "sdpa_packed(Tensor q, Tensor k, Tensor v, Tensor query_start_loc, float scale, int? window, float? softcap, "
    "Tensor? sinks) -> Tensor"
)
_LIBRARY.define(
    "sdpa_paged(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor query_start_loc, "
    "Tensor seq_lens, float scale, int? window, float? softcap, Tensor? sinks, Tensor? k_scale, "
    "Tensor? v_scale) -> Tensor"
)


def _sdpa_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    out = q.new_zeros(q.shape)
    starts = query_start_loc.tolist()
    for start, end in itertools.pairwise(starts):
        if end > start:
            keys, values = k[start:end].transpose(0, 1), v[start:end].transpose(0, 1)
            _attend(q[start:end], keys, values, out[start:end], 0, 0, scale, window, softcap, sinks)
    return out


def _sdpa_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Tensor:
    out = q.new_zeros(q.shape)
    block_size = k_cache.shape[2]
    k_heads_first, v_heads_first = k_cache.transpose(0, 1), v_cache.transpose(0, 1)
    starts = query_start_loc.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        start, end = starts[row], starts[row + 1]
        if end == start:
            continue
        query_at = length - (end - start)
        # Pages that slid out of the window may be stale or handed to another request: never read them.
        first_page = max(0, query_at - window + 1) // block_size if window is not None else 0
        first_key = first_page * block_size
        pages = block_table[row, first_page : -(-length // block_size)]
        keys = k_heads_first[:, pages].flatten(1, 2)[:, : length - first_key]
        values = v_heads_first[:, pages].flatten(1, 2)[:, : length - first_key]
        if k_scale is not None and v_scale is not None:
            keys, values = (keys.float() * k_scale).to(q.dtype), (values.float() * v_scale).to(q.dtype)
        _attend(q[start:end], keys, values, out[start:end], query_at, first_key, scale, window, softcap, sinks)
    return out


def _attend(
    q_LNH: Tensor,
    k_KSH: Tensor,
    v_KSH: Tensor,
    out_LNH: Tensor,
    query_at: int,
    key_at: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Attend within one request; the first query and key stand at positions `query_at` and `key_at`."""
    queries, heads, head_size = q_LNH.shape
    kv_heads = k_KSH.shape[0]
    # Query heads that share a key head ride along as the head dimension: keys are broadcast, not copied.
    q_KGLH = q_LNH.view(queries, kv_heads, heads // kv_heads, head_size).permute(1, 2, 0, 3)
    out_KGLH = out_LNH.view(queries, kv_heads, heads // kv_heads, head_size).permute(1, 2, 0, 3)
    step = queries if window is None or queries <= window else _QUERIES_AT_A_TIME
    for first in range(0, queries, step):
        last = min(first + step, queries)
        low, high = 0, query_at + last - key_at
        if window is not None:
            low = max(0, query_at + first - window + 1 - key_at)
        keys, values = k_KSH[:, None, low:high], v_KSH[:, None, low:high]
        shape = (kv_heads, heads // kv_heads, high - low, head_size)
        causal = query_at + first == key_at + low and (window is None or last - first <= window)
        mask = None
        if not causal and last - first > 1:
            queries_at = torch.arange(query_at + first, query_at + last)[:, None]
            keys_at = torch.arange(key_at + low, key_at + high)[None, :]
            mask = keys_at <= queries_at
            if window is not None:
                mask &= keys_at > queries_at - window
        part = q_KGLH[:, :, first:last]
        # The fused kernel gives what is no number a weight of 0, and adds its mask to it instead of choosing.
        fused = softcap is None and sinks is None and not _has_nan(part)
        if fused and (last - first == 1 or not (_has_nan(keys) or _has_nan(values))):
            result = F.scaled_dot_product_attention(
                part,
                keys.expand(shape),
                values.expand(shape),
                attn_mask=mask,
                is_causal=causal and last - first > 1,
                scale=scale,
            )
        else:
            if causal and last - first > 1:
                mask = torch.ones(last - first, high - low, dtype=torch.bool).tril()
            result = _explicit(part, keys, values, mask, scale, softcap, sinks)
        out_KGLH[:, :, first:last] = result


def _has_nan(x: Tensor) -> bool:
    return bool(x.isnan().any())


def _explicit(
    q_KGLH: Tensor,
    k_K1SH: Tensor,
    v_K1SH: Tensor,
    mask_LS: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend with a softcap or sinks, which torch's fused attention does not have; fp32 inside."""
    logits = torch.matmul(q_KGLH.float(), k_K1SH.float().transpose(-1, -2)) * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if mask_LS is not None:
        logits = logits.masked_fill(~mask_LS, float("-inf"))
    if sinks is None:
        weights = logits.softmax(-1)
    else:
        sink = sinks.float().view(*q_KGLH.shape[:2], 1, 1).expand(*logits.shape[:3], 1)
        weights = torch.cat((logits, sink), dim=-1).softmax(-1)[..., :-1]
    return torch.matmul(weights, v_K1SH.float()).to(q_KGLH.dtype)


def _like_q(q: Tensor, *rest: object) -> Tensor:
    return q.new_empty(q.shape)


for _name, _function in (("sdpa_packed", _sdpa_packed), ("sdpa_paged", _sdpa_paged)):
    _LIBRARY.impl(_name, _function, "CPU")
    torch.library.register_fake(f"pilotage::{_name}", _like_q, lib=_LIBRARY)


def _scales(call: Call) -> str | None:
    cache, given = call["k_cache"].dtype, [call.arguments.get(name) is not None for name in ("k_scale", "v_scale")]
    if any(given) and not all(given):
        return "one of keys and values has a scale"
    if not any(given) and (cache != call["q"].dtype or call["v_cache"].dtype != cache):
        return f"queries are {call['q'].dtype}, and the cache {cache} without scales"
    return None


# torch rounds the softmax's weights to the tensors' dtype before their product with the values. Keys and values of a
# single query are not looked through for what is no number: that would be to read them twice.
_PACKED = Domain(targets=("cpu",), dtypes=_DTYPES, one_dtype=("q", "k", "v"), error=1.5, hides_non_finite=True)
_PAGED = Domain(targets=("cpu",), dtypes=(*_DTYPES, KV_8BIT), other=_scales, error=1.5, hides_non_finite=True)

_OPTIONS = ("scale", "window", "softcap", "sinks")
_PACKED_ARGUMENTS = ("q", "k", "v", "query_start_loc", *_OPTIONS)
_PAGED_ARGUMENTS = ("q", "k_cache", "v_cache", "block_table", "query_start_loc", "seq_lens", *_OPTIONS)

for _operator, _op, _domain, _arguments in (
    ("flash_attention", torch.ops.pilotage.sdpa_packed, _PACKED, _PACKED_ARGUMENTS),
    ("segmented_attention", torch.ops.pilotage.sdpa_paged, _PAGED, (*_PAGED_ARGUMENTS, "k_scale", "v_scale")),
    ("attention_decode", torch.ops.pilotage.sdpa_paged, _PAGED, (*_PAGED_ARGUMENTS, "k_scale", "v_scale")),
):
    register(_operator, "sdpa", picking(_operator, _op, *_arguments), domain=_domain, priority=10)
