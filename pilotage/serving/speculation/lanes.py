"""The pages of a model that drafts: apart from the served model's, one lane of the longest length for each request.

So nothing of the served model's cache (prefix hits, preemption, pages that slide out of a window) reaches them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pilotage.serving.graphs import Graphs

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_input_batch import InputBatch

BLOCK_SIZE = 32


def config_of_draft(vllm_config: VllmConfig) -> VllmConfig:
    """Return the configuration with the draft model in the place of the served one."""
    assert vllm_config.speculative_config is not None
    own = copy.copy(vllm_config)
    own.model_config = copy.copy(vllm_config.speculative_config.draft_model_config)
    own.model_config.enforce_eager = vllm_config.model_config.enforce_eager
    return own


def cache_bytes(model: Any, vllm_config: VllmConfig) -> int:
    """Return what the lanes of a draft model take, on this rank."""
    lanes = vllm_config.scheduler_config.max_num_seqs * _pages(vllm_config)
    return sum(
        (1 if layer.one_row else 2) * lanes * layer.num_kv_heads * BLOCK_SIZE * layer.head_size * layer.dtype.itemsize
        for layer in model.get_kv_spec().layers
    )


def _pages(vllm_config: VllmConfig) -> int:
    return -(-vllm_config.model_config.max_model_len // BLOCK_SIZE)


class Lanes:
    """Pages and graphs of a draft model.

    Args:
        model: loaded.
        vllm_config: of the served model.
        token_buckets, seq_buckets, prefill_seqs: of the served model's graphs; its own have the same sizes.

    Attributes:
        graphs: of the draft model.
        pages_of: [lanes, pages] page numbers.
        max_len: the longest sequence that the draft model continues.
        width: tokens that a lane holds.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config: VllmConfig,
        *,
        token_buckets: Sequence[int],
        seq_buckets: Sequence[int],
        prefill_seqs: int,
    ) -> None:
        own = config_of_draft(vllm_config)
        self.max_len = min(vllm_config.model_config.max_model_len, own.model_config.max_model_len)
        lanes, pages = vllm_config.scheduler_config.max_num_seqs, _pages(vllm_config)
        specs, device = model.get_kv_spec().layers, next(model.parameters()).device  # type: ignore[operator]
        caches: dict[str, list[Tensor]] = {
            layer.name: layer.pages(lanes * pages, BLOCK_SIZE, device=device) for layer in specs
        }
        model.bind_kv_cache(caches)  # type: ignore[operator]
        group = SimpleNamespace(
            layer_names=[layer.name for layer in specs], kv_cache_spec=SimpleNamespace(block_size=BLOCK_SIZE)
        )
        own.model_config.max_model_len = vllm_config.model_config.max_model_len  # columns of the lanes' block table
        self.graphs = Graphs(
            own,
            model,
            SimpleNamespace(kv_cache_groups=[group]),  # type: ignore[arg-type]
            caches,
            token_buckets=token_buckets,
            seq_buckets=seq_buckets,
            prefill_seqs=prefill_seqs,
            samples=False,
        )
        self.pages_of: npt.NDArray[np.int32] = np.arange(lanes * pages, dtype=np.int32).reshape(lanes, pages)
        self.width = pages * BLOCK_SIZE
        self._lane: dict[str, int] = {}

    def of(self, req_id: str, batch: InputBatch) -> tuple[npt.NDArray[np.int32], str | None]:
        """Return the pages of a request's lane, and whose they were where it was given this lane just now.

        The name is "" where the lane was nobody's, None where the request has had it already.
        """
        lane, was = self._lane.get(req_id), None
        if lane is None:
            was = ""
            free = set(range(len(self.pages_of))) - set(self._lane.values())
            if not free:  # of a request that has ended or waits; should it come back, it is computed again
                was = next(name for name in self._lane if name not in batch.req_id_to_index)
                free = {self._lane.pop(was)}
            lane = self._lane[req_id] = min(free)
        return self.pages_of[lane], was


def shared(known: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32]) -> int:
    """Return how many tokens two sequences begin with in common."""
    count = min(len(known), len(tokens))
    differs = np.flatnonzero(known[:count] != tokens[:count])
    return int(differs[0]) if len(differs) else count
