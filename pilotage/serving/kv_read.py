"""Reading keys and values straight from the pages of the running engine, request by request, when a request is done.

A finished request's pages stay as they are until the next step that may hand them to another one. So they are read
before that step runs, or when reading stops: what is compared is what the last decode step had in its cache.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pilotage.core import store
from pilotage.serving.batch import LayerGroup

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.v1.core.sched.output import SchedulerOutput

    from pilotage.models.common.kv import LayerSpec
    from pilotage.serving.requests import Requests


def first_kept(computed: int, window: int | None) -> int:
    """Return the first position that a layer still holds: pages that a window has passed are given away."""
    return 0 if window is None else max(0, computed - window + 1)


def gather(pages: Tensor, blocks: Sequence[int], first: int, end: int) -> Tensor:
    """Return positions [first, end) of one request.

    Args:
        pages: [P, K, C, H].
        blocks: the request's pages in order.
        first: position, inclusive.
        end: position, exclusive.

    Returns:
        [end - first, K, H], a copy.
    """
    size = pages.shape[2]
    start = first // size
    chosen = pages[torch.tensor(list(blocks[start : -(-end // size)]), dtype=torch.int64)]
    rows = chosen.transpose(1, 2).reshape(-1, pages.shape[1], pages.shape[3])
    return rows[first - start * size : end - start * size].contiguous()


class KVReader:
    """Writes one safetensors file for each finished request: `<layer>.k` and `<layer>.v`, each [positions, K, H].

    The file's metadata holds the request id, the number of computed positions, for each layer the first position
    that it still held, and the dtype that the numbers are stored in. Numbers of 8 bits are written as attention reads
    them, multiplied by the layer's scale. With several ranks each writes the heads that it has.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        layers: Sequence[LayerSpec],
        groups: Sequence[LayerGroup],
        caches: Mapping[str, Sequence[Tensor]],
        scales: Mapping[str, Sequence[Tensor]],
        requests: Requests,
    ) -> None:
        """Start reading; requests that finish from now on are kept.

        Args:
            directory: created where it is missing.
            rank: of this process, part of the files' names.
            layers: the model's cache layers on this rank.
            groups: layers that share a block table, in vLLM's order.
            caches: layer name -> [keys, values].
            scales: layer name -> [of keys, of values], where the cache has them.
            requests: the runner's.
        """
        self.directory, self.rank, self.caches, self.requests = directory, rank, caches, requests
        self.scales = scales
        self.windows = {layer.name: layer.sliding_window for layer in layers}
        self.groups = list(groups)
        self.computed: dict[str, int] = {}
        self.files: list[dict[str, str]] = []
        directory.mkdir(parents=True, exist_ok=True)

    def before(self, step: SchedulerOutput) -> None:
        """Read what finished since the last step, and note what this one will compute."""
        for req_id in sorted(step.finished_req_ids):
            self._keep(req_id)
        cached = step.scheduled_cached_reqs
        starts = {data.req_id: data.num_computed_tokens for data in step.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for req_id, count in step.num_scheduled_tokens.items():
            self.computed[req_id] = starts[req_id] + count

    def stop(self) -> list[dict[str, str]]:
        """Read the requests that are still there; returns {"request", "file"} of everything read."""
        for req_id in list(self.computed):
            self._keep(req_id)
        return self.files

    def _keep(self, req_id: str) -> None:
        from safetensors.torch import save_file

        state, computed = self.requests.states.get(req_id), self.computed.pop(req_id, 0)
        if state is None or not computed:
            return
        # The last sampled token was never an input; rejected drafts were, and are not part of the request.
        end = min(computed, state.num_tokens - 1 if state.output_token_ids else computed)
        tensors: dict[str, Tensor] = {}
        first: dict[str, int] = {}
        for group, blocks in zip(self.groups, state.block_ids, strict=True):
            for name in group.layer_names:
                first[name] = first_kept(end, self.windows[name])
                for kind, pages, scale in zip(
                    "kv", self.caches[name], self.scales.get(name, (None, None)), strict=True
                ):
                    rows = gather(pages, blocks, first[name], end)
                    tensors[f"{name}.{kind}"] = rows if scale is None else rows.float() * scale
        stored = str(next(iter(self.caches.values()))[0].dtype).removeprefix("torch.")
        metadata = {"request": req_id, "positions": str(end), "first": json.dumps(first), "stored": stored}
        path = self.directory / f"{len(self.files):06d}-{self.rank}.safetensors"

        def write(temporary: Path) -> Any:
            save_file(tensors, temporary, metadata=metadata)

        store.write_file(path, write)
        self.files.append({"request": req_id, "file": str(path)})
