"""Drafts from an EAGLE3 head, which continues the served model from its hidden states.

At each position the head reads the served model's hidden states there and the token after it. Those states exist only
in the step that computes them, so a lane follows the served model step by step. A prefix that was found in the cache
brings none: the lane then begins behind it, and the head sees the tokens from there on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


@dataclass
class Lane:
    """What a lane holds: `tokens` (each the one after its position), the first for position `first` of the request."""

    first: int
    tokens: npt.NDArray[np.int32]

    def cut(self, start: int, tokens: npt.NDArray[np.int32]) -> int:
        """Make the lane end before position `start`, or begin there if it does not reach it.

        Args:
            start: position of the next hidden state.
            tokens: of the request from its second one on, as far as they are known.

        Returns:
            How many positions stay.
        """
        kept = shared(self.tokens, tokens[self.first : start]) if self.first <= start else 0
        if self.first + kept != start:  # a gap, or another text
            self.first, kept = start, 0
        self.tokens = self.tokens[:kept]
        return kept


class Eagle3:
    """Proposes what the head names.

    Args:
        head: loaded, see `models.eagle3`.
        vllm_config: of the served model.
        choice: of the tokens.
        token_buckets, seq_buckets, prefill_seqs: of the served model's graphs; its own have the same sizes.
    """

    def __init__(
        self,
        head: Any,
        vllm_config: VllmConfig,
        choice: Choice,
        *,
        token_buckets: Sequence[int],
        seq_buckets: Sequence[int],
        prefill_seqs: int,
    ) -> None:
        assert vllm_config.speculative_config is not None
        self.head, self.choice = head, choice
        self.count = int(vllm_config.speculative_config.num_speculative_tokens)
        self.token_buckets, self.prefill_seqs = token_buckets, prefill_seqs
        self.lanes = Lanes(
            head, vllm_config, token_buckets=token_buckets, seq_buckets=seq_buckets, prefill_seqs=prefill_seqs
        )
        self._held: dict[str, Lane] = {}
        self._seen: dict[str, tuple[int, Tensor]] = {}  # position of the first hidden state of this step, and all

    def warm_up(self) -> float:
        """Compile or load the graphs; returns the seconds spent."""
        return self.lanes.graphs.warm_up()

    @torch.no_grad()
    def observe(
        self, req_ids: Sequence[str], counts: Sequence[int], computed: Sequence[int], aux_hidden_states: Tensor
    ) -> None:
        """Take the hidden states of a forward of the served model.

        Args:
            req_ids: of its rows.
            counts: tokens of each.
            computed: positions before those.
            aux_hidden_states: [T, states * D'], the rows' tokens one after another, then padding.
        """
        rows = self.head.combine(aux_hidden_states[: sum(counts)]).split(list(counts))
        for req_id, start, states in zip(req_ids, computed, rows, strict=True):
            self._seen[req_id] = (start, states)

    def propose(self, batch: InputBatch, rows: Sequence[int]) -> list[list[int]]:
        """Propose for every row of the batch; only `rows` get drafts, the others' lanes follow."""
        drafts: list[list[int]] = [[] for _ in range(batch.num_reqs)]
        computed = np.zeros(batch.num_reqs, dtype=np.int32)
        tokens = np.zeros((batch.num_reqs, self.lanes.width), dtype=np.int32)
        tables = np.zeros((batch.num_reqs, self.lanes.pages_of.shape[1]), dtype=np.int32)
        states: dict[int, Tensor] = {}
        for row in range(batch.num_reqs):
            self.choice.forget(batch.req_ids[row])
            found = self._follow(batch, row, tables)
            if found is not None:
                computed[row], held, states[row] = found
                tokens[row, : len(held)] = held
        self._seen.clear()
        step = [Scheduled(row=row, num_tokens=len(states[row]), fresh=len(states[row]) > 1) for row in states]
        rows = [row for row in rows if row in states and self._has_room(batch, row)]
        if not step:
            return drafts
        logits, states = self._run(step, states, computed, tokens, tables)
        for item in step:
            computed[item.row] += item.num_tokens
        for number in range(self.count if rows else 0):
            best = self.choice.choose(batch, rows, torch.stack([logits[row] for row in rows]))
            for row in rows:
                drafts[row].append(best[row])
                tokens[row, computed[row]] = best[row]
            if number + 1 < self.count:
                step = [Scheduled(row=row, num_tokens=1, fresh=False) for row in rows]
                logits, states = self._run(step, states, computed, tokens, tables)
                for row in rows:
                    computed[row] += 1
        return drafts

    def _has_room(self, batch: InputBatch, row: int) -> bool:
        return int(batch.num_tokens_no_spec[row]) + self.count <= self.lanes.max_len

    def _follow(
        self, batch: InputBatch, row: int, tables: npt.NDArray[np.int32]
    ) -> tuple[int, npt.NDArray[np.int32], Tensor] | None:
        """Bring a lane's book up to this step.

        Returns:
            How many positions it has computed, all its tokens, and hidden states [new positions, D]; None where the
            step brought nothing.
        """
        req_id = batch.req_ids[row]
        start, states = self._seen.get(req_id, (0, None))
        length = int(batch.num_tokens_no_spec[row])
        count = 0 if states is None else min(len(states), length - 1 - start)  # rejected drafts are none of its text
        if states is None or count < 1:
            return None
        tables[row], was = self.lanes.of(req_id, batch)
        if was is not None:
            self._held.pop(was, None)
            self._held[req_id] = Lane(start, np.empty(0, dtype=np.int32))
        after = batch.token_ids_cpu[row, 1:length]
        lane = self._held[req_id]
        kept = lane.cut(start, after)
        lane.tokens = np.concatenate((lane.tokens, after[start : start + count]))
        return kept, lane.tokens, states[:count]

    def _run(
        self,
        step: Sequence[Scheduled],
        states: dict[int, Tensor],
        computed: npt.NDArray[np.int32],
        tokens: npt.NDArray[np.int32],
        tables: npt.NDArray[np.int32],
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Run the head; returns for each row of the batch logits [V] and hidden state [1, D] after its last token."""
        logits: dict[int, Tensor] = {}
        after: dict[int, Tensor] = {}
        for forward in split(step, max_tokens=self.token_buckets[-1], max_prefill_seqs=self.prefill_seqs):
            inputs = self.lanes.graphs.inputs_for(forward, computed)
            inputs.fill(forward, token_ids=tokens, num_computed=computed, block_tables=[tables])
            assert inputs.hidden_states is not None
            inputs.hidden_states[: sum(forward.num_tokens)] = torch.cat([states[row] for row in forward.rows])
            found, hidden = self.lanes.graphs.run(inputs)
            ends = np.cumsum(forward.num_tokens).tolist()
            for index, (row, end) in enumerate(zip(forward.rows, ends, strict=True)):
                logits[row], after[row] = found[index], hidden[end - 1 : end].clone()
        return logits, after
