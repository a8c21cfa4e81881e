"""The worker's own view of the running requests, kept up to date from what the scheduler sends.

The scheduler sends differences: new requests whole, later only page numbers and counts. Sampled tokens never come
back from it, so they are kept here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.sampling_params import SamplingType
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from pilotage.serving.batch import Scheduled

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

    from pilotage.serving.sampling import PromptScores


class Requests:
    """All known requests, and the batch of those scheduled now.

    Attributes:
        batch: vLLM's input batch; its rows are the rows of `Scheduled`.
        states: by request id, scheduled or not.
    """

    def __init__(self, batch: InputBatch, prompt_scores: PromptScores, *, async_scheduling: bool) -> None:
        self.batch, self.prompt_scores, self.async_scheduling = batch, prompt_scores, async_scheduling
        self.states: dict[str, CachedRequestState] = {}

    def update(self, step: SchedulerOutput) -> list[Scheduled]:
        """Apply a scheduler step; returns what is to be computed, in the scheduler's order."""
        for req_id in step.finished_req_ids:
            self.states.pop(req_id, None)
            self.prompt_scores.drop(req_id)
            self.batch.remove_request(req_id)
        cached = step.scheduled_cached_reqs
        # Preempted or merely not scheduled: out of the batch, but remembered.
        staying = step.num_scheduled_tokens.keys() - cached.resumed_req_ids
        for req_id in self.batch.req_id_to_index.keys() - staying:
            self.batch.remove_request(req_id)

        entering = [self._new(data) for data in step.scheduled_new_reqs]
        for position, req_id in enumerate(cached.req_ids):
            if (state := self._cached(cached, position, req_id)) is not None:
                entering.append(state)
        for state in entering:
            self.batch.add_request(state)
        self.batch.condense()
        for req_id in self.batch.req_ids:
            self.batch.update_req_spec_token_ids(self.states[req_id], step.scheduled_spec_decode_tokens)
        self.batch.refresh_metadata()

        fresh = {state.req_id for state in entering}
        return [
            Scheduled(row=self.batch.req_id_to_index[req_id], num_tokens=count, fresh=req_id in fresh)
            for req_id, count in step.num_scheduled_tokens.items()
        ]

    def _new(self, data: NewRequestData) -> CachedRequestState:
        if data.req_id in self.states:  # a streaming session hands in its prompt again, longer
            self.batch.remove_request(data.req_id)
            self.prompt_scores.drop(data.req_id)
        params = data.sampling_params
        assert params is not None
        generator = None
        if params.sampling_type == SamplingType.RANDOM_SEED:
            generator = torch.Generator()
            generator.manual_seed(params.seed)
        state = CachedRequestState(
            req_id=data.req_id,
            prompt_token_ids=data.prompt_token_ids,
            mm_features=data.mm_features,
            sampling_params=params,
            generator=generator,
            block_ids=data.block_ids,
            num_computed_tokens=data.num_computed_tokens,
            output_token_ids=[],
            lora_request=None,
            prompt_embeds=data.prompt_embeds,
            prompt_is_token_ids=data.prompt_is_token_ids,
        )
        self.states[data.req_id] = state
        self.prompt_scores.add(data.req_id, params.prompt_logprobs)
        return state

    def _cached(self, cached: CachedRequestData, position: int, req_id: str) -> CachedRequestState | None:
        """Update a known request; returns it if it has to enter the batch."""
        state = self.states[req_id]
        row = self.batch.req_id_to_index.get(req_id)
        num_computed, num_output = cached.num_computed_tokens[position], cached.num_output_tokens[position]
        state.num_computed_tokens = num_computed
        if num_output < len(state.output_token_ids):  # the scheduler threw tokens away that were under way
            del state.output_token_ids[num_output:]
            if row is not None:
                self.batch.num_tokens_no_spec[row] = state.num_prompt_tokens + num_output
        pages = cached.new_block_ids[position]
        if req_id in cached.resumed_req_ids:
            assert pages is not None
            state.block_ids = pages
        elif pages is not None:
            for have, more in zip(state.block_ids, pages, strict=True):
                have.extend(more)
        if row is None:
            if self.async_scheduling and num_output:
                # Tokens sampled while the request was being preempted are known to the scheduler, not always here.
                tokens = cached.all_token_ids[req_id]
                state.output_token_ids[:] = tokens[len(tokens) - num_output :]
            return state
        self.batch.num_computed_tokens_cpu[row] = num_computed
        if pages is not None:
            self.batch.block_table.append_row(pages, row)
        return None

    def unfinished_prefills(self, step: list[Scheduled]) -> list[int]:
        """Return the rows whose prompt is not computed to its end by this step: they have no token to sample."""
        batch = self.batch
        return [
            item.row
            for item in step
            if batch.num_computed_tokens_cpu[item.row] + item.num_tokens < batch.num_tokens_no_spec[item.row]
        ]

    def append(self, sampled: list[list[int]]) -> None:
        """Keep this step's tokens; rows without one have an empty list."""
        batch = self.batch
        for row, tokens in enumerate(sampled):
            if not tokens:
                continue
            start = int(batch.num_tokens_no_spec[row])
            end = start + len(tokens)
            batch.token_ids_cpu[row, start:end] = tokens
            batch.is_token_ids[row, start:end] = True
            batch.num_tokens_no_spec[row] = end
            self.states[batch.req_ids[row]].output_token_ids.extend(tokens)

    def computed(self) -> dict[str, int]:
        """Return by request how many of its positions are computed for good.

        The newest token is not computed yet. Drafts that stood behind the request's last token (it has all that it may
        have, or stopped; a stop string is not seen here) are no tokens of it.
        """
        rows = self.batch
        found = {}
        for row, req_id in enumerate(rows.req_ids):
            state, params = self.states[req_id], self.states[req_id].sampling_params
            end = int(rows.num_tokens_no_spec[row])
            if params is not None:
                output = state.output_token_ids
                last = next((n for n, token in enumerate(output) if token in params.all_stop_token_ids), len(output))
                allowed = len(output) if params.max_tokens is None else params.max_tokens
                end = min(end, state.num_prompt_tokens + min(last + 1, allowed))
            found[req_id] = end - 1
        return found
