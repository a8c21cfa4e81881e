"""The paged attention context: where attention finds the cache's addresses, so that model code need not."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

import pilotage.functional as NF
from pilotage.parallel import Component, own_rows, shares_rows


class AttentionLayer(Protocol):
    """What the context asks of an attention module."""

    layer_name: str
    kv_cache: tuple[Tensor, Tensor]


class PagedContext(dict[str, Any]):
    """The metadata of one step, keyed by layer name.

    A dictionary as the guide documents it, e.g. `ctx["layers.0.self_attn"]["slot_mapping"]`, plus the top-level keys
    `positions` [T] int32, `decode_token_threshold` and, where a graph can leave rows out, `wanted_rows` [T + 1] int32:
    how many rows of the last layer's output are read in this step, and then which; and `likely_only` [1] int32, not
    zero where nothing but the largest logit of a row is read. A layer's entry has

    | key | what |
    |---|---|
    | block_table_tensor | [B, M] int32 page numbers |
    | slot_mapping | [T] int64, page * block_size + offset; -1 is padding |
    | query_start_loc | [B + 1] int32; its last entry is where padding starts |
    | seq_lens | [B] int32, tokens cached after this step |
    | cached_seq_len | [B] int32, tokens cached before it; absent or None in a graph for requests with nothing cached |
    | token_to_req | [T] int32, row of each token in the block table |
    | max_query_len, decode_token_threshold | ints of the bucket; decode where the first is at most the second |
    | kv_segment_size | int of the bucket: cached keys read at a time, 0 for all at once |
    | block_size, max_blocks_per_seq | ints |

    What changes between steps is a tensor; ints are constants of a bucket, or the graph is compiled again.
    """

    def decodes(self, layer_name: str) -> bool:
        """Whether this is a graph of the decode kind, by the contract's rule."""
        meta = self[layer_name]
        return bool(meta["max_query_len"] <= meta["decode_token_threshold"])

    def attend(
        self,
        layer: AttentionLayer,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Cache k and v, then attend from q to all that its request has cached.

        Args:
            layer: the attention module; has `layer_name`, and `kv_cache` once pages are bound. One with a `kv_source`
                reads what that layer has cached in this step, and caches nothing. One with `one_row` caches k, which
                is v as well, once. Pages of 8-bit floats come with `k_scale` and `v_scale`.
            q: [T, N, H], rotated.
            k, v: [T, K, H], k rotated.
            scale, window, softcap, sinks: see `NF.flash_attention`.

        Returns:
            [T, N, H]; of a layer whose replicas share the rows, this rank's.
        """
        source = getattr(layer, "kv_source", None)
        name = source or layer.layer_name
        meta = self[name]
        k_cache, v_cache = layer.kv_cache
        one_row = getattr(layer, "one_row", False)
        if one_row:
            v_cache = k_cache
        k_scale: Any = getattr(layer, "k_scale", None)
        v_scale: Any = getattr(layer, "v_scale", None)
        scaled = k_scale is not None and v_scale is not None  # a cache of 8-bit numbers
        if source is None:
            if scaled:
                k, v = NF.quantise_kv(k, k_scale), NF.quantise_kv(v, v_scale)
            if one_row:
                NF.write_rows(k_cache, k, slot_mapping=meta["slot_mapping"])
            else:
                NF.write_kv(k_cache, v_cache, k, v, slot_mapping=meta["slot_mapping"])
        rows = {
            "token_to_req": meta["token_to_req"],
            "positions": self["positions"],
            "query_start_loc": meta["query_start_loc"],
        }
        how: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
        scales = {"k_scale": k_scale, "v_scale": v_scale} if scaled else {}
        component: Component | None = getattr(layer, "component", None)
        if component is not None and shares_rows(component):
            return self._attend_own_rows(component, meta, q, (k_cache, v_cache), how | scales)
        decode = self.decodes(name)
        # What a token sees must not depend on how its prompt was cut: rounded keys are read back, new ones too.
        if not decode and not scaled and meta.get("cached_seq_len") is None:
            return NF.flash_attention(q, k, v, **rows, **how)
        how |= scales
        rows["block_table"], rows["seq_lens"] = meta["block_table_tensor"], meta["seq_lens"]
        if decode:
            return NF.attention_decode(q, k_cache, v_cache, **rows, **how)
        return NF.segmented_attention(q, k_cache, v_cache, kv_segment_size=meta["kv_segment_size"], **rows, **how)

    def _attend_own_rows(
        self, component: Component, meta: Any, q: Tensor, pages: tuple[Tensor, Tensor], how: dict[str, Any]
    ) -> Tensor:
        """Attend from the rows of this rank's replica, a range that may begin and end inside requests."""
        count, starts = q.shape[0] // component.dp.world_size, meta["query_start_loc"]
        first = component.dp.rank * count
        cut = starts.clamp(first, first + count)
        return NF.segmented_attention(
            own_rows(q, component),
            *pages,
            block_table=meta["block_table_tensor"],
            token_to_req=own_rows(meta["token_to_req"], component),
            positions=own_rows(self["positions"], component),
            query_start_loc=cut - first,
            # A request's last own row sees what is cached up to it: here the request is that long.
            seq_lens=meta["seq_lens"] - (starts[1:] - cut[1:]).clamp(min=0),
            kv_segment_size=meta["kv_segment_size"],
            **how,
        )
