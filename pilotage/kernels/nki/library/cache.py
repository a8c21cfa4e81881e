"""Writing new keys and values into the paged cache."""

from __future__ import annotations

from typing import Any

from pilotage.kernels.nki.frontend import jit, nisa, nl
from pilotage.kernels.nki.library.parts import P, cast, load, spans


@jit
def write_kv(k_cache: Any, v_cache: Any, k: Any, v: Any, rows: Any) -> None:
    """Scatter keys and values into their slots, in place.

    Args:
        k_cache, v_cache: [P, K, C, H].
        k, v: [T, K, H].
        rows: [T, K] int32, the row of [P * K * C, H] that each goes to; negative for padding, which writes nothing.

    Numerics: exact copies, cast to the cache's dtype.
    """
    tokens, heads, size = k.shape
    for cache, new in ((k_cache, k), (v_cache, v)):
        total = cache.shape[0] * cache.shape[1] * cache.shape[2]
        flat = cache.reshape((total, size))
        for start, count in spans(tokens, P):
            where = load(rows[start : start + count, :], (count, heads))
            for head in range(heads):
                tile = load(new[start : start + count, head, :], (count, size))
                if tile.dtype != cache.dtype:
                    tile = cast(tile, cache.dtype)
                index = nl.ndarray((count, 1), dtype=nl.int32, buffer=nl.sbuf)
                nisa.tensor_copy(dst=index, src=where[:, head : head + 1])
                place = flat.ap(pattern=[[size, count], [1, size]], offset=0, vector_offset=index, indirect_dim=0)
                nisa.dma_copy(dst=place, src=tile, oob_mode=nisa.oob_mode.skip)
