"""Drafts from a smaller model of the same vocabulary.

Its keys and values lie in pages of its own, one lane of the longest length for each request of a batch, so nothing of
the served model's cache (prefix hits, preemption, pages that slide out of a window) reaches it: a lane remembers which
tokens it has computed, and computes what a request has beyond those.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pilotage.serving.batch import Scheduled, split
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
        2 * lanes * layer.num_kv_heads * BLOCK_SIZE * layer.head_size * layer.dtype.itemsize
        for layer in model.get_kv_spec().layers
    )


def _pages(vllm_config: VllmConfig) -> int:
    return -(-vllm_config.model_config.max_model_len // BLOCK_SIZE)


class DraftModel:
    """Proposes what a smaller model finds most likely.

    Its choice is certain, so verification takes its probability as 1 and the output is distributed as without it.

    Args:
        model: loaded.
        vllm_config: of the served model.
        token_buckets, seq_buckets, prefill_seqs: of the served model's graphs; its own have the same sizes.
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
        self.count = int(vllm_config.speculative_config.num_speculative_tokens)
        self.max_len = min(vllm_config.model_config.max_model_len, own.model_config.max_model_len)
        self.token_buckets, self.prefill_seqs = token_buckets, prefill_seqs
        lanes, pages = vllm_config.scheduler_config.max_num_seqs, _pages(vllm_config)
        specs, device = model.get_kv_spec().layers, next(model.parameters()).device
        caches: dict[str, list[Tensor]] = {
            layer.name: [
                torch.zeros(
                    lanes * pages, layer.num_kv_heads, BLOCK_SIZE, layer.head_size, dtype=layer.dtype, device=device
                )
                for _ in range(2)
            ]
            for layer in specs
        }
        model.bind_kv_cache(caches)
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
        )
        self._pages_of = np.arange(lanes * pages, dtype=np.int32).reshape(lanes, pages)
        self._lane: dict[str, int] = {}
        self._known: dict[str, npt.NDArray[np.int32]] = {}  # tokens whose keys and values are in the lane

    def warm_up(self) -> float:
        """Compile or load the graphs; returns the seconds spent."""
        return self.graphs.warm_up()

    def propose(self, batch: InputBatch, rows: Sequence[int]) -> list[list[int]]:
        """Propose for every row of the batch; only `rows` get drafts."""
        drafts: list[list[int]] = [[] for _ in range(batch.num_reqs)]
        rows = [row for row in rows if int(batch.num_tokens_no_spec[row]) + self.count <= self.max_len]
        if not rows:
            return drafts
        lengths = np.zeros(batch.num_reqs, dtype=np.int64)
        computed = np.zeros(batch.num_reqs, dtype=np.int32)
        tokens = np.zeros((batch.num_reqs, self._pages_of.size // len(self._pages_of) * BLOCK_SIZE), dtype=np.int32)
        tables = np.zeros((batch.num_reqs, self._pages_of.shape[1]), dtype=np.int32)
        for row in rows:
            req_id, length = batch.req_ids[row], int(batch.num_tokens_no_spec[row])
            lengths[row] = length
            tokens[row, :length] = batch.token_ids_cpu[row, :length]
            tables[row] = self._pages_of[self._lane_of(req_id, batch)]
            computed[row] = min(_shared(self._known[req_id], tokens[row, :length]), length - 1)
        best = self._catch_up(rows, lengths, computed, tokens, tables)
        for row in rows:
            self._known[batch.req_ids[row]] = tokens[row, : lengths[row]].copy()
            drafts[row].append(best[row])
        for _ in range(1, self.count):
            for row in rows:
                tokens[row, lengths[row]] = best[row]
                computed[row] = lengths[row]
                lengths[row] += 1
            best = self._run([Scheduled(row=row, num_tokens=1, fresh=False) for row in rows], computed, tokens, tables)
            for row in rows:
                drafts[row].append(best[row])
        return drafts

    def _lane_of(self, req_id: str, batch: InputBatch) -> int:
        lane = self._lane.get(req_id)
        if lane is None:
            free = set(range(len(self._pages_of))) - set(self._lane.values())
            if not free:  # of a request that has ended or waits; should it come back, it is computed again
                gone = next(name for name in self._lane if name not in batch.req_id_to_index)
                free = {self._lane.pop(gone)}
                del self._known[gone]
            lane = self._lane[req_id] = min(free)
            self._known[req_id] = np.empty(0, dtype=np.int32)
        return lane

    def _catch_up(
        self,
        rows: Sequence[int],
        lengths: npt.NDArray[np.int64],
        computed: npt.NDArray[np.int32],
        tokens: npt.NDArray[np.int32],
        tables: npt.NDArray[np.int32],
    ) -> dict[int, int]:
        """Compute what the lanes lack, in chunks that fit a graph; returns the token after each row's last."""
        best: dict[int, int] = {}
        while left := [row for row in rows if computed[row] < lengths[row]]:
            step = [
                Scheduled(
                    row=row, num_tokens=min(int(lengths[row] - computed[row]), self.token_buckets[-1]), fresh=True
                )
                for row in left
            ]
            best |= self._run(step, computed, tokens, tables)
            for item in step:
                computed[item.row] += item.num_tokens
        return best

    def _run(
        self,
        step: Sequence[Scheduled],
        computed: npt.NDArray[np.int32],
        tokens: npt.NDArray[np.int32],
        tables: npt.NDArray[np.int32],
    ) -> dict[int, int]:
        found: Mapping[int, int] = {}
        for forward in split(step, max_tokens=self.token_buckets[-1], max_prefill_seqs=self.prefill_seqs):
            inputs = self.graphs.inputs_for(forward, computed)
            inputs.fill(forward, token_ids=tokens, num_computed=computed, block_tables=[tables])
            logits, _ = self.graphs.run(inputs)
            best = logits[: len(forward.rows)].float().argmax(-1).tolist()
            found = {**found, **dict(zip(forward.rows, best, strict=True))}
        return dict(found)


def _shared(known: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32]) -> int:
    """Return how many tokens two sequences begin with in common."""
    count = min(len(known), len(tokens))
    differs = np.flatnonzero(known[:count] != tokens[:count])
    return int(differs[0]) if len(differs) else count
