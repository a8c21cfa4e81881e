"""What stands between logits and tokens beside vLLM's sampler: forced tokens, and scores of prompt tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinTokensLogitsProcessor,
    process_dict_updates,
)

from pilotage.serving.platform import FORCE_KEY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor.interface import BatchUpdate
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_input_batch import CachedRequestState


class ForcedTokens(LogitsProcessor):
    """Makes the n-th output token of a request the n-th of `extra_args["pilotage_force"]`, at any temperature.

    Past the end of the list the request is free again. Raw logits and logprobs are taken before this and stay true.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.vocab_size = vllm_config.model_config.get_vocab_size()
        self.forced: dict[int, tuple[list[int], list[int]]] = {}  # row -> (forced, output so far)
        self.sampled: dict[int, int] = {}  # row -> the token that the graph has sampled for it
        # With drafts, a request has logits for several of its next tokens; then `force_drafts` has done it.
        self.done_with_drafts = False

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.forced, batch_update, self._request)

    @staticmethod
    def _request(params: Any, _prompt: list[int] | None, output: list[int]) -> tuple[list[int], list[int]] | None:
        forced = (params.extra_args or {}).get(FORCE_KEY)
        return (list(forced), output) if forced else None

    def apply(self, logits: Tensor) -> Tensor:
        if not self.done_with_drafts:
            for row, (forced, output) in self.forced.items():
                self._force(logits[row], forced, len(output))
            for row, token in self.sampled.items():
                self._force(logits[row], [token], 0)
        return logits

    def force_drafts(self, logits: Tensor, counts: Sequence[int], sampled: Mapping[int, Sequence[int]]) -> None:
        """Force the tokens of requests with drafts, in place.

        Args:
            logits: request by request, a row for each draft and one for the token after them.
            counts: rows of each request.
            sampled: row of the batch -> the tokens that the graph has sampled for it.
        """
        ends = np.cumsum(counts)
        for row, (forced, output) in self.forced.items():
            first = int(ends[row]) - counts[row]
            for offset in range(counts[row]):
                self._force(logits[first + offset], forced, len(output) + offset)
        for row, tokens in sampled.items():
            for place, token in enumerate(tokens, int(ends[row]) - counts[row]):
                self._force(logits[place], [token], 0)

    @staticmethod
    def _force(row: Tensor, forced: list[int], number: int) -> None:
        if number < len(forced):
            row.fill_(float("-inf"))
            row[forced[number]] = 0.0


def only_argmax(metadata: SamplingMetadata) -> bool:
    """Tell whether vLLM's sampler would do no more with a batch than take the largest logit of each row."""
    holder = metadata.thinking_budget_state_holder
    return (
        metadata.all_greedy
        and metadata.max_num_logprobs is None
        and not metadata.logprob_token_ids
        and metadata.no_penalties
        and metadata.allowed_token_ids_mask is None
        and not metadata.bad_words_token_ids
        and (holder is None or not holder.has_tracked_requests())
        and all(_idle(processor) for processor in metadata.logitsprocs.non_argmax_invariant)
    )


def _idle(processor: LogitsProcessor) -> bool:
    """Whether a processor has no request to work on; one that is not known here always has."""
    if isinstance(processor, ForcedTokens):
        return not processor.forced and not processor.sampled
    if isinstance(processor, LogitBiasLogitsProcessor):
        return not processor.biases
    return isinstance(processor, MinTokensLogitsProcessor) and not processor.min_toks


class PromptScores:
    """Collects `prompt_logprobs`, chunk by chunk, and hands them out with the last chunk of the prompt."""

    ROWS = 64  # prompt rows scored at a time: at a vocabulary of 262,144 this is 64 MiB of logits

    def __init__(self, sampler: Sampler, logprobs_mode: str, vocab_size: int) -> None:
        self.sampler, self.raw_logits, self.vocab_size = sampler, logprobs_mode.endswith("_logits"), vocab_size
        self.wanted: dict[str, int] = {}

    def add(self, req_id: str, prompt_logprobs: int | None) -> None:
        """Start collecting for a request; -1 asks for the whole vocabulary."""
        if prompt_logprobs is not None:
            self.wanted[req_id] = self.vocab_size if prompt_logprobs == -1 else prompt_logprobs

    def drop(self, req_id: str) -> None:
        """Forget a request."""
        self.wanted.pop(req_id, None)

    def collect(
        self,
        requests: dict[str, CachedRequestState],
        hidden: dict[str, Tensor],
        compute_logits: Callable[[Tensor], Tensor],
    ) -> dict[str, LogprobsTensors]:
        """Score this step's prompt rows.

        Args:
            requests: state by request id; `num_computed_tokens` counts what was computed before this step.
            hidden: request id -> hidden states [tokens of this step, D] after the final norm.
            compute_logits: the model's head.

        Returns:
            The complete scores of requests whose last prompt row was computed in this step.
        """
        finished: dict[str, LogprobsTensors] = {}
        for req_id, count in list(self.wanted.items()):
            if req_id not in hidden:
                continue
            request, rows = requests[req_id], hidden[req_id]
            prompt = request.prompt_token_ids
            if prompt is None:
                continue
            scores = request.in_progress_prompt_logprobs_cpu
            if scores is None:
                scores = LogprobsTensors.empty_cpu(len(prompt) - 1, count + 1)
                request.in_progress_prompt_logprobs_cpu = scores
            start = request.num_computed_tokens
            # Row i scores token i + 1; the last prompt row scores the first output token, which is no prompt token.
            # A chunk that ends exactly there is handed out with the next step, which has an output token to go with.
            remaining = len(prompt) - 1 - start
            last = rows.shape[0] > remaining
            for first in range(0, min(rows.shape[0], remaining), self.ROWS):
                stop = min(first + self.ROWS, rows.shape[0], remaining)
                self._score(scores, start + first, prompt, compute_logits(rows[first:stop]), count)
            if last:
                finished[req_id] = scores
                request.in_progress_prompt_logprobs_cpu = None
                del self.wanted[req_id]
        return finished

    def _score(self, scores: LogprobsTensors, start: int, prompt: list[int], logits: Tensor, count: int) -> None:
        targets = torch.tensor(prompt[start + 1 : start + 1 + logits.shape[0]], dtype=torch.int64)
        values = logits.float() if self.raw_logits else self.sampler.compute_logprobs(logits)
        gathered = self.sampler.gather_logprobs(values, count, targets)
        rows = slice(start, start + logits.shape[0])
        scores.logprob_token_ids[rows] = gathered.logprob_token_ids
        scores.logprobs[rows] = gathered.logprobs
        scores.selected_token_ranks[rows] = gathered.selected_token_ranks
