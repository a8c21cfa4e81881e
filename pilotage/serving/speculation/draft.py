"""Drafts from a smaller model of the same vocabulary: a lane remembers which tokens it has computed, and computes what
a request has beyond those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from pilotage.serving.batch import Scheduled, split
from pilotage.serving.speculation.choice import Choice
from pilotage.serving.speculation.lanes import Lanes, shared

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_input_batch import InputBatch


class DraftModel:
    """Proposes what a smaller model would go on with.

    Args:
        model: loaded.
        vllm_config: of the served model.
        choice: of the tokens.
        token_buckets, seq_buckets, prefill_seqs: of the served model's graphs; its own have the same sizes.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config: VllmConfig,
        choice: Choice,
        *,
        token_buckets: Sequence[int],
        seq_buckets: Sequence[int],
        prefill_seqs: int,
    ) -> None:
        assert vllm_config.speculative_config is not None
        self.count = int(vllm_config.speculative_config.num_speculative_tokens)
        self.token_buckets, self.prefill_seqs, self.choice = token_buckets, prefill_seqs, choice
        self.lanes = Lanes(
            model, vllm_config, token_buckets=token_buckets, seq_buckets=seq_buckets, prefill_seqs=prefill_seqs
        )
        self._known: dict[str, npt.NDArray[np.int32]] = {}  # tokens whose keys and values are in the lane

    def observe(self, *states: object) -> None:
        """Do nothing: it reads tokens only."""

    def warm_up(self) -> float:
        """Compile or load the graphs; returns the seconds spent."""
        return self.lanes.graphs.warm_up()

    def propose(self, batch: InputBatch, rows: Sequence[int]) -> list[list[int]]:
        """Propose for every row of the batch; only `rows` get drafts."""
        drafts: list[list[int]] = [[] for _ in range(batch.num_reqs)]
        rows = [row for row in rows if int(batch.num_tokens_no_spec[row]) + self.count <= self.lanes.max_len]
        for row in rows:
            self.choice.forget(batch.req_ids[row])
        if not rows:
            return drafts
        lengths = np.zeros(batch.num_reqs, dtype=np.int64)
        computed = np.zeros(batch.num_reqs, dtype=np.int32)
        tokens = np.zeros((batch.num_reqs, self.lanes.width), dtype=np.int32)
        tables = np.zeros((batch.num_reqs, self.lanes.pages_of.shape[1]), dtype=np.int32)
        for row in rows:
            req_id, length = batch.req_ids[row], int(batch.num_tokens_no_spec[row])
            lengths[row] = length
            tokens[row, :length] = batch.token_ids_cpu[row, :length]
            tables[row], was = self.lanes.of(req_id, batch)
            if was is not None:
                self._known.pop(was, None)
                self._known[req_id] = np.empty(0, dtype=np.int32)
            computed[row] = min(shared(self._known[req_id], tokens[row, :length]), length - 1)
        best = self.choice.choose(batch, rows, self._catch_up(rows, lengths, computed, tokens, tables))
        for row in rows:
            self._known[batch.req_ids[row]] = tokens[row, : lengths[row]].copy()
            drafts[row].append(best[row])
        for _ in range(1, self.count):
            for row in rows:
                tokens[row, lengths[row]] = best[row]
                computed[row] = lengths[row]
                lengths[row] += 1
            step = [Scheduled(row=row, num_tokens=1, fresh=False) for row in rows]
            found = self._run(step, computed, tokens, tables)
            best = self.choice.choose(batch, rows, torch.stack([found[row] for row in rows]))
            for row in rows:
                drafts[row].append(best[row])
        return drafts

    def _catch_up(
        self,
        rows: Sequence[int],
        lengths: npt.NDArray[np.int64],
        computed: npt.NDArray[np.int32],
        tokens: npt.NDArray[np.int32],
        tables: npt.NDArray[np.int32],
    ) -> Tensor:
        """Compute what the lanes lack, in chunks that fit a graph; returns logits [rows, V] after each row's last."""
        last: dict[int, Tensor] = {}
        while left := [row for row in rows if computed[row] < lengths[row]]:
            step = [
                Scheduled(
                    row=row, num_tokens=min(int(lengths[row] - computed[row]), self.token_buckets[-1]), fresh=True
                )
                for row in left
            ]
            last |= self._run(step, computed, tokens, tables)
            for item in step:
                computed[item.row] += item.num_tokens
        return torch.stack([last[row] for row in rows])

    def _run(
        self,
        step: Sequence[Scheduled],
        computed: npt.NDArray[np.int32],
        tokens: npt.NDArray[np.int32],
        tables: npt.NDArray[np.int32],
    ) -> Mapping[int, Tensor]:
        found: dict[int, Tensor] = {}
        for forward in split(step, max_tokens=self.token_buckets[-1], max_prefill_seqs=self.prefill_seqs):
            inputs = self.lanes.graphs.inputs_for(forward, computed)
            inputs.fill(forward, token_ids=tokens, num_computed=computed, block_tables=[tables])
            logits, _ = self.lanes.graphs.run(inputs)
            found |= dict(zip(forward.rows, logits[: len(forward.rows)], strict=True))
        return found
