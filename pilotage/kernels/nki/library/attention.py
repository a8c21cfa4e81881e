"""Attention: prefill among packed tokens, and decode over the paged cache.

Both walk over keys 128 at a time with a running softmax (Milakov and Gimelshein, 2018). What a query must not see is
chosen away, not added away: a masked slot may hold anything, NaN included.
"""

from __future__ import annotations

from typing import Any

from pilotage.kernels.nki.frontend import jit, nisa, nl
from pilotage.kernels.nki.library.parts import P, cast, columns, load, product, spans, spread, transposed

_MASKED = -1.0e30


@jit
def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    queries: Any,
    keys: Any,
    sinks: Any,
    scale: float,
    window: int,
    softcap: float,
) -> Any:
    """Attend among the new tokens.

    Args:
        q: [T, N, H].
        k, v: [T, K, H].
        queries: [T, 2] float32, request and position of each query; padding has a request that no key has.
        keys: [2, T] float32, the same of each key; padding has a negative request.
        sinks: [N] float32 or None.
        scale, softcap: as in `functional.flash_attention`; softcap 0 for none.
        window: 0 for none.

    Returns:
        [T, N, H] in q's dtype.

    Numerics: logits are sums of the given types in float32; softmax, weights, values and their sums float32.
    """
    tokens, heads, size = q.shape
    group = heads // k.shape[1]
    out = nl.ndarray((tokens, heads, size), dtype=q.dtype, buffer=nl.shared_hbm)
    for head in range(k.shape[1]):
        turned, values = [], []
        for start, count in spans(tokens, P):
            turned.append(columns(load(k[start : start + count, head, :], (count, size)), size))
            owner = load(keys.ap(pattern=[[1, count], [1, 1]], offset=start), (count, 1))
            real = nl.ndarray((count, 1), dtype=nl.uint8, buffer=nl.sbuf)
            nisa.tensor_scalar(dst=real, data=owner, op0=nl.greater_equal, operand0=0.0)
            values.append(_kept(load(v[start : start + count, head, :], (count, size)), real))
        for first, rows in spans(tokens, P):
            facts = load(queries[first : first + rows, :], (rows, 2))
            # Keys lie in the order of their positions: those behind the last query of this tile are its future.
            reach = [one for one in spans(tokens, P) if one[0] < first + rows]
            masks = [_visible(facts, keys, start, count, tokens, window) for start, count in reach]
            for member in range(group):
                query = head * group + member
                left = columns(load(q[first : first + rows, query, :], (rows, size)), size)
                state = _State(rows, size)
                for at in range(len(reach)):
                    state.step(product(left, turned[at]), masks[at], values[at], scale, softcap)
                state.finish(sinks, query, 1)
                nisa.dma_copy(dst=out[first : first + rows, query, :], src=state.result(q.dtype))
    return out


def _visible(facts: Any, keys: Any, start: int, count: int, tokens: int, window: int) -> Any:
    """Compute [rows, count] of 0 and 1: same request, not later, within the window."""
    rows = facts.shape[0]
    owner, at = spread(keys, rows, start, count), spread(keys, rows, tokens + start, count)
    seen = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
    part = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
    request, position = facts[:, 0:1], facts[:, 1:2]
    nisa.tensor_scalar(dst=seen, data=owner, op0=nl.equal, operand0=request)
    nisa.tensor_scalar(dst=part, data=at, op0=nl.less_equal, operand0=position)
    nisa.tensor_tensor(dst=seen, data1=seen, data2=part, op=nl.multiply)
    if window > 0:
        nisa.tensor_scalar(dst=part, data=at, op0=nl.add, operand0=float(window), op1=nl.greater, operand1=position)
        nisa.tensor_tensor(dst=seen, data1=seen, data2=part, op=nl.multiply)
    return cast(seen, nl.uint8)


def _kept(tile: Any, keep: Any) -> Any:
    """Give a tile in float32 with the partitions that `keep` [rows, 1] does not mark set to zero."""
    rows, size = tile.shape
    clean = nl.ndarray((rows, size), dtype=tile.dtype, buffer=nl.sbuf)
    nisa.memset(dst=clean, value=0.0)
    nisa.tensor_copy_predicated(dst=clean, src=tile, predicate=keep.ap(pattern=[[1, rows], [0, size]], offset=0))
    return cast(clean, nl.float32)


class _State(nl.NKIObject):
    """A running softmax of some rows: maximum, sum of exponentials, weighted values."""

    def __init__(self, rows: int, size: int) -> None:
        self.top = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        self.total = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        self.values = nl.ndarray((rows, size), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=self.top, value=_MASKED)
        nisa.memset(dst=self.total, value=0.0)
        nisa.memset(dst=self.values, value=0.0)

    def step(self, logits: Any, visible: Any, values: Any, scale: float, softcap: float) -> None:
        """Add keys: logits [rows, n] in PSUM, visible [rows, n] uint8, values [n, H] float32."""
        rows, count = logits.shape
        scaled = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
        if softcap > 0:
            nisa.activation(dst=scaled, op=nl.tanh, data=logits, scale=scale / softcap)
            nisa.tensor_scalar(dst=scaled, data=scaled, op0=nl.multiply, operand0=softcap)
        else:
            nisa.tensor_scalar(dst=scaled, data=logits, op0=nl.multiply, operand0=scale)
        chosen = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=chosen, value=_MASKED)
        nisa.tensor_copy_predicated(dst=chosen, src=scaled, predicate=visible)
        top = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=top, op=nl.maximum, data=chosen, axis=1)
        shrink = self._raise(top)
        weights = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
        added = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        below = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=below, data=self.top, op0=nl.multiply, operand0=-1.0)
        nisa.activation(
            dst=weights,
            op=nl.exp,
            data=chosen,
            bias=below,
            reduce_op=nl.add,
            reduce_res=added,
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )
        nisa.scalar_tensor_tensor(
            dst=self.total, data=self.total, op0=nl.multiply, operand0=shrink, op1=nl.add, operand1=added
        )
        seen = product([transposed(weights)], [values])
        nisa.scalar_tensor_tensor(
            dst=self.values, data=self.values, op0=nl.multiply, operand0=shrink, op1=nl.add, operand1=seen
        )

    def _raise(self, top: Any) -> Any:
        """Lift the maximum to at least `top` [rows, 1]; give what everything so far has to be multiplied by."""
        rows = top.shape[0]
        lifted = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        shrink = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=lifted, data1=self.top, data2=top, op=nl.maximum)
        nisa.tensor_tensor(dst=shrink, data1=self.top, data2=lifted, op=nl.subtract)
        nisa.activation(dst=shrink, op=nl.exp, data=shrink)
        self.top = lifted
        return shrink

    def finish(self, sinks: Any, first: int, step: int) -> None:
        """Let the sinks of query heads take part: `first` for all rows (step 1) or one head after another (step 0)."""
        rows = self.top.shape[0]
        if sinks is None:
            return
        pattern = [[0, rows], [1, 1]] if step else [[1, rows], [1, 1]]
        sink = load(sinks.ap(pattern=pattern, offset=first), (rows, 1))
        shrink = self._raise(sink)
        nisa.tensor_tensor(dst=sink, data1=sink, data2=self.top, op=nl.subtract)
        nisa.activation(dst=sink, op=nl.exp, data=sink)
        nisa.scalar_tensor_tensor(
            dst=self.total, data=self.total, op0=nl.multiply, operand0=shrink, op1=nl.add, operand1=sink
        )
        nisa.tensor_scalar(dst=self.values, data=self.values, op0=nl.multiply, operand0=shrink)

    def result(self, dtype: Any) -> Any:
        """Divide the values by the sum."""
        rows, size = self.values.shape
        inverse = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.reciprocal(dst=inverse, data=self.total)
        out = nl.ndarray((rows, size), dtype=dtype, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=out, data=self.values, op0=nl.multiply, operand0=inverse)
        return out


@jit
def attention_decode(
    q: Any, k_cache: Any, v_cache: Any, rows: Any, bounds: Any, sinks: Any, scale: float, softcap: float
) -> Any:
    """Attend from single tokens to the paged cache.

    Args:
        q: [T, N, H].
        k_cache, v_cache: [P, K, C, H].
        rows: [T, S] int32, the row of [P * K * C, H] of each cached token's first head.
        bounds: [T, 2] float32, the first position that each token sees and the first that it does not.
        sinks: [N] float32 or None.
        scale, softcap: as in `flash_attention`.

    Returns:
        [T, N, H] in q's dtype.

    Numerics: as `flash_attention`.
    """
    tokens, heads, size = q.shape
    _, kv_heads, slots, _ = k_cache.shape
    group, length = heads // kv_heads, rows.shape[1]
    total = k_cache.shape[0] * kv_heads * slots
    flat_k, flat_v = k_cache.reshape((total, size)), v_cache.reshape((total, size))
    out = nl.ndarray((tokens, heads, size), dtype=q.dtype, buffer=nl.shared_hbm)
    for token in range(tokens):
        for head in range(kv_heads):
            mine = head * group
            left = columns(load(q[token, mine : mine + group, :], (group, size)), size)
            state = _State(group, size)
            for start, count in spans(length, P):
                index = load(rows.ap(pattern=[[1, count], [1, 1]], offset=token * length + start), (count, 1))
                nisa.tensor_scalar(dst=index, data=index, op0=nl.add, operand0=head * slots)
                right = columns(_gathered(flat_k, index), size)
                seen = _between(bounds, token, count, 1, start, 1)
                values = _kept(_gathered(flat_v, index), seen)
                state.step(
                    product(left, right), _between(bounds, token, group, count, start, 0), values, scale, softcap
                )
            state.finish(sinks, mine, 0)
            nisa.dma_copy(dst=out[token, mine : mine + group, :], src=state.result(q.dtype))
    return out


def _gathered(flat: Any, index: Any) -> Any:
    count, size = index.shape[0], flat.shape[1]
    return load(
        flat.ap(pattern=[[size, count], [1, size]], offset=0, vector_offset=index, indirect_dim=0), (count, size)
    )


def _between(bounds: Any, token: int, rows: int, count: int, start: int, along: int) -> Any:
    """Mark positions within a token's bounds: `start` plus the partition (along 1) or plus the column (along 0)."""
    limits = load(bounds.ap(pattern=[[0, rows], [1, 2]], offset=2 * token), (rows, 2))
    at = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=at, pattern=[[1 - along, count]], offset=start, channel_multiplier=along)
    below = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=below, data=at, op0=nl.less, operand0=limits[:, 1:2])
    nisa.tensor_scalar(dst=at, data=at, op0=nl.greater_equal, operand0=limits[:, 0:1])
    nisa.tensor_tensor(dst=at, data1=at, data2=below, op=nl.multiply)
    return cast(at, nl.uint8)
