"""Drive a model without an engine: pages, block tables and metadata for module checks and tests.

`PagedSession` plays the runner for a handful of requests: it hands out pages in a scattered order, packs requests into
one step of flat tokens, pads to a bucket, and returns the logits of every new token. `build_metadata` is its pure part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pilotage.models.common.context import PagedContext
from pilotage.models.common.kv import KVSpec


def build_metadata(
    layer_names: Sequence[str],
    *,
    num_computed: Sequence[int],
    num_new: Sequence[int],
    block_table: Tensor,
    block_size: int,
    num_tokens: int,
    decode: bool = False,
    kv_segment_size: int = 0,
    fresh: bool = False,
) -> PagedContext:
    """Build the metadata of one step for layers that share a block table.

    Args:
        layer_names: the layers' names in the KV spec.
        num_computed: per request, tokens cached before the step.
        num_new: per request, tokens of the step; they lie one request after another.
        block_table: [R, M] page numbers, R at least the number of requests; further rows are padding.
        block_size: slots in a page.
        num_tokens: the bucket: T after padding.
        decode: for a decode graph, one token per request.
        kv_segment_size: cached keys read at a time, 0 for all at once.
        fresh: for a prefill graph that reads nothing cached; `num_computed` must be 0.

    Returns:
        The context; shapes depend on the bucket, R and M only.

    Raises:
        ValueError: the requests do not fit the bucket, or contradict `decode` or `fresh`.
    """
    rows, total = block_table.shape[0], sum(num_new)
    if total > num_tokens or len(num_new) > rows:
        raise ValueError(f"{len(num_new)} requests of {total} tokens do not fit {rows} rows and {num_tokens} tokens")
    if (decode and max(num_new) > 1) or (fresh and any(num_computed)):
        raise ValueError("these requests are not for this kind of graph")
    counts = torch.tensor([*num_new, *[0] * (rows - len(num_new))])
    cached = torch.tensor([*num_computed, *[0] * (rows - len(num_computed))])
    ends = counts.cumsum(0)
    token_to_req = torch.zeros(num_tokens, dtype=torch.int64)
    token_to_req[:total] = torch.repeat_interleave(torch.arange(rows), counts)
    positions = torch.zeros(num_tokens, dtype=torch.int64)
    positions[:total] = torch.arange(total) + (cached - (ends - counts))[token_to_req[:total]]
    slots = torch.full((num_tokens,), -1, dtype=torch.int64)
    at = positions[:total]
    slots[:total] = block_table[token_to_req[:total], at // block_size].long() * block_size + at % block_size
    shared = {
        "block_table_tensor": block_table.to(torch.int32),
        "slot_mapping": slots,
        "max_query_len": 1 if decode else num_tokens,
        "block_size": block_size,
        "max_blocks_per_seq": block_table.shape[1],
        "decode_token_threshold": 1,
        "cached_seq_len": None if fresh else cached.to(torch.int32),
        "kv_segment_size": kv_segment_size,
        "query_start_loc": torch.cat((torch.zeros(1, dtype=torch.int64), ends)).to(torch.int32),
        "seq_lens": (cached + counts).to(torch.int32),
        "token_to_req": token_to_req.to(torch.int32),
    }
    return PagedContext(
        dict.fromkeys(layer_names, shared), positions=positions.to(torch.int32), decode_token_threshold=1
    )


@dataclass(kw_only=True)
class PagedSession:
    """A model's cache and the requests in it.

    Attributes:
        model: has `get_kv_spec`, `bind_kv_cache` and the contract's forward.
        num_requests: rows of the block table.
        max_tokens: longest request.
        block_size: slots in a page.
        call: what runs a step, e.g. `torch.compile(model, ...)`; None for the model itself.
        poison: fill pages with NaN first, so that a read of what was never written shows.
        history: tokens of each request so far.
    """

    model: Any
    num_requests: int
    max_tokens: int
    block_size: int = 4
    call: Callable[..., Any] | None = None
    poison: bool = True
    history: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        spec: KVSpec = self.model.get_kv_spec()
        self.layer_names = [layer.name for layer in spec.layers]
        per_request = -(-self.max_tokens // self.block_size)
        num_pages = self.num_requests * per_request + 1
        order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(0)) + 1
        self.block_table = order.view(self.num_requests, per_request).to(torch.int32)
        fill = float("nan") if self.poison else 0.0
        self.pages = {layer.name: layer.pages(num_pages, self.block_size, fill=fill) for layer in spec.layers}
        self.model.bind_kv_cache(self.pages)
        self.history = [[] for _ in range(self.num_requests)]

    def step(self, new: Mapping[int, Sequence[int]], *, bucket: int | None = None, **options: Any) -> dict[int, Tensor]:
        """Run one forward.

        Args:
            new: request -> its next token ids, in the order in which they are packed.
            bucket: T after padding; None for no padding.
            options: of `build_metadata`: `decode`, `fresh`, `kv_segment_size`.

        Returns:
            request -> logits [new tokens, V].
        """
        total = sum(len(ids) for ids in new.values())
        bucket = bucket or total
        requests = list(new)
        # Requests of the step come first, as in a runner's batch; the others' rows are there as padding.
        others = [r for r in range(self.num_requests) if r not in new]
        context = build_metadata(
            self.layer_names,
            num_computed=[len(self.history[r]) for r in requests],
            num_new=[len(ids) for ids in new.values()],
            block_table=self.block_table[[*requests, *others]],
            block_size=self.block_size,
            num_tokens=bucket,
            **options,
        )
        flat = [token for ids in new.values() for token in ids]
        input_ids = torch.tensor(flat + [0] * (bucket - total))
        with torch.no_grad():
            run = self.model if self.call is None else self.call
            logits = run(input_ids, context["positions"], context, torch.arange(bucket))
        for request, ids in new.items():
            self.history[request].extend(ids)
        return dict(zip(requests, logits[:total].split([len(ids) for ids in new.values()]), strict=True))
