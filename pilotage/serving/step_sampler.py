"""From a step's logits to its tokens: the graph's own, vLLM's sampler's, and what is left of the drafts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from vllm.v1.outputs import SamplerOutput

import pilotage.functional as NF
from pilotage.serving import speculation
from pilotage.serving.sampling import ForcedTokens, only_argmax

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_input_batch import InputBatch

    from pilotage.serving.device_sampling import DeviceSampling
    from pilotage.serving.speculation.choice import Choice


class StepSampler:
    """Samples a token of each row of the batch, or verifies its drafts.

    Args:
        batch: vLLM's.
        sampler: vLLM's.
        verifier: vLLM's rejection sampler.
        graph: what was sampled inside the graphs; None where nothing is.
    """

    def __init__(
        self, batch: InputBatch, sampler: Sampler, verifier: RejectionSampler, graph: DeviceSampling | None
    ) -> None:
        self.batch, self.sampler, self.verifier, self.graph = batch, sampler, verifier, graph

    def __call__(
        self, logits: Tensor, drafts: Sequence[Sequence[int]], num_unfinished: int, choice: Choice | None
    ) -> SamplerOutput:
        """Sample from the logits of a step.

        Args:
            logits: [*, V], request by request a row for each of its drafts and one for the token after them.
            drafts: of each row of the batch.
            num_unfinished: rows without a token to sample; theirs means nothing.
            choice: how drafts were chosen, where a model drafted them.

        Returns:
            Tokens [rows, most tokens of a row]; with drafts, -1 stands after the last one of a row.
        """
        if any(drafts):
            return self._verified(logits, drafts, num_unfinished, choice)
        return self._sampled(logits, num_unfinished)

    def _sampled(self, logits: Tensor, num_unfinished: int) -> SamplerOutput:
        metadata = self.batch.sampling_metadata
        tokens = {row: token for row, (token,) in self.graph.tokens.items()} if self.graph is not None else {}
        if not tokens and only_argmax(metadata):
            found = NF.greedy_tokens(logits)
            return SamplerOutput(sampled_token_ids=found[:, None].to(torch.int32), logprobs_tensors=None)
        logits = logits.float()
        if not tokens:
            return self.sampler(logits=logits, sampling_metadata=metadata)
        if len(tokens) + num_unfinished == self.batch.num_reqs and metadata.max_num_logprobs is None:
            return _tokens_alone([[tokens.get(row, 0)] for row in range(self.batch.num_reqs)])
        # The sampler scores all tokens and draws the others.
        forced = self._forced()
        forced.sampled = tokens
        try:
            with self._numbers_kept(tokens):
                return self.sampler(logits=logits, sampling_metadata=metadata)
        finally:
            forced.sampled = {}

    def _verified(
        self, logits: Tensor, drafts: Sequence[Sequence[int]], num_unfinished: int, choice: Choice | None
    ) -> SamplerOutput:
        batch, metadata = self.batch, self.batch.sampling_metadata
        sampled = self.graph.tokens if self.graph is not None else {}
        if sampled and len(sampled) + num_unfinished == batch.num_reqs and metadata.max_num_logprobs is None:
            assert self.graph is not None
            found = self.graph.verified(drafts, batch.generators)
            return _tokens_alone([found.get(row, []) for row in range(batch.num_reqs)])
        logits, forced, spec = logits.float(), self._forced(), speculation.metadata(drafts)
        # Of a token that is given, the log-probability is the model's.
        scored = metadata.max_num_logprobs is not None and bool(forced.forced or sampled)
        raw = logits.clone() if scored else logits
        forced.force_drafts(logits, [1 + len(ids) for ids in drafts], sampled)
        chances = None
        if choice is not None:
            chances = choice.probabilities(batch.req_ids[: batch.num_reqs], drafts, logits.shape[1])
        forced.done_with_drafts = True
        try:
            with self._numbers_kept(sampled):
                output = self.verifier(spec, chances, logits, metadata)
        finally:
            forced.done_with_drafts = False
        if self.graph is not None:
            self.graph.verified(drafts, batch.generators)
        if not scored or self.verifier.is_processed_logprobs_mode:
            return output
        scores = self.verifier._get_logprobs_tensors(
            metadata.max_num_logprobs,
            spec,
            raw,
            raw[spec.target_logits_indices],
            raw[spec.bonus_logits_indices],
            output.sampled_token_ids,
        )
        return dataclasses.replace(output, logprobs_tensors=scores)

    @contextlib.contextmanager
    def _numbers_kept(self, rows: Iterable[int]) -> Iterator[None]:
        """Give random numbers of these rows back that are drawn inside the block: the graph has drawn theirs."""
        generators = self.batch.generators
        kept = {row: generators[row].get_state() for row in rows if row in generators}
        try:
            yield
        finally:
            for row, state in kept.items():
                generators[row].set_state(state)

    def _forced(self) -> ForcedTokens:
        processors = self.batch.logitsprocs.non_argmax_invariant
        return next(processor for processor in processors if isinstance(processor, ForcedTokens))


def _tokens_alone(tokens: Sequence[Sequence[int]]) -> SamplerOutput:
    """Return tokens of rows as vLLM has them, without scores."""
    width = max(map(len, tokens))
    padded = [[*row, *[-1] * (width - len(row))] for row in tokens]
    return SamplerOutput(sampled_token_ids=torch.tensor(padded, dtype=torch.int32), logprobs_tensors=None)
