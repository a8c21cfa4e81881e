"""Sampling inside the graph: which requests it serves, and the numbers that it needs for them.

With drafts the graph samples the token after each of them as well, from the model's own distribution. A draft that is
the sampled token stands, and the first that is not is replaced by it. Whatever was drafted, every token that comes out
has been drawn from its own distribution with the next of the request's random numbers: a seed gives the tokens that it
gives without drafts. For drafts without probabilities this accepts as often as rejection sampling (2211.17192) does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

import pilotage.functional as NF
from pilotage.core.errors import Unsupported

if TYPE_CHECKING:
    from torch import Tensor
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_input_batch import InputBatch

    from pilotage.core.config import TargetConfig
    from pilotage.serving.batch import Forward, StepInputs


def require_supported(vllm_config: VllmConfig, config: TargetConfig) -> None:
    """Raise where sampling in the graph cannot be combined with what else is configured.

    Raises:
        Unsupported: with drafts that are drawn, or where log-probabilities of processed logits are asked for.
    """
    if config.on_device_sampling_config is None:
        return
    where = "on_device_sampling_config"
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.draft_sample_method == "probabilistic":
        raise Unsupported(
            "the graph verifies drafts by the tokens that it samples, not by the probabilities they were drawn with",
            where=where,
            do="remove draft_sample_method, or on_device_sampling_config",
        )
    if vllm_config.model_config.logits_processors:
        raise Unsupported("logits_processors of your own do not run inside the graph", where=where, do="remove one")
    mode = vllm_config.model_config.logprobs_mode
    if mode.startswith("processed"):
        raise Unsupported(
            f"the graph returns raw logits, not those of logprobs_mode={mode!r}", where=where, do="use raw_logprobs"
        )


class DeviceSampling:
    """Decides request by request who samples, and keeps what the graph sampled until the step's end.

    A request belongs to the graph if all that it asks of a sampler is among the parameters which the graph applies.
    That depends on the request alone: its seed gives the same tokens whoever else is in the batch.

    Args:
        stages: parameters that the graph applies.
        force_key: of `extra_args`; a request that has it follows given tokens.

    Attributes:
        tokens: row of the batch -> what was sampled in this step after each of its last tokens, drafts among them.
    """

    def __init__(self, stages: Mapping[str, bool], *, force_key: str) -> None:
        self.stages = frozenset(name for name, on in stages.items() if on)
        self.force_key = force_key
        self.tokens: dict[int, list[int]] = {}
        self._owns: dict[str, bool] = {}
        self._outside: dict[int, tuple[Tensor, Tensor]] = {}  # row -> parameters and numbers of what no graph samples
        self._before: dict[int, Tensor] = {}  # row -> its generator's state before this step's numbers

    def owns(self, params: SamplingParams) -> bool:
        """Tell whether the graph samples for a request with these parameters."""
        if params.temperature > 0 and "temperature" not in self.stages:
            return False
        if params.temperature > 0 and params.top_k > 0 and "top_k" not in self.stages:
            return False
        if params.temperature > 0 and params.top_p < 1 and "top_p" not in self.stages:
            return False
        penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        others = (
            params.min_p,
            params.min_tokens,
            params.logit_bias,
            params.allowed_token_ids,
            params.bad_words,
            params.structured_outputs,
            params.logprob_token_ids,
            getattr(params, "thinking_token_budget", None) is not None,
            params.logprobs == -1,
            (params.extra_args or {}).get(self.force_key),
        )
        return not penalised and not any(others)

    def begin(self, finished: Iterable[str]) -> None:
        """Start a step; requests that have ended are forgotten."""
        self.tokens.clear()
        self._outside.clear()
        self._before.clear()
        for req_id in finished:
            self._owns.pop(req_id, None)

    def fill(
        self,
        inputs: StepInputs,
        forward: Forward,
        batch: InputBatch,
        states: Mapping[str, Any],
        unfinished: set[int],
        counts: Sequence[int],
    ) -> None:
        """Write parameters and random numbers of a forward's requests.

        Args:
            inputs: of the graph.
            forward: its rows.
            batch, states: vLLM's batch and request states.
            unfinished: rows of the batch without a token to sample; they use up no random number.
            counts: of each of the forward's requests, how many of its last tokens need a token sampled.
        """
        assert inputs.sampling_params is not None and inputs.sampling_noise is not None
        for row, places, count in zip(forward.rows, inputs.sampled_rows(forward, counts), counts, strict=True):
            req_id = batch.req_ids[row]
            params = states[req_id].sampling_params
            owned = self._owns.get(req_id)
            if owned is None:
                owned = self._owns[req_id] = self.owns(params)
            if not owned or row in unfinished or params.temperature < _GREEDY:
                continue  # left at temperature 0
            wanted = torch.tensor([float(max(params.top_k, 0)), params.top_p, params.temperature])
            noise = self._numbers(row, count, batch.generators.get(row))
            if places is None:
                self._outside[row] = wanted.expand(count, 3), noise
            else:
                inputs.sampling_params[places.start : places.stop] = wanted
                inputs.sampling_noise[places.start : places.stop] = noise

    def _numbers(self, row: int, count: int, generator: torch.Generator | None) -> Tensor:
        """Draw the request's next numbers, one by one: how many a step takes must not show in them."""
        if count > 1 and generator is not None:
            self._before[row] = generator.get_state()
        return torch.stack([torch.rand((), generator=generator, dtype=torch.float64) for _ in range(count)])

    def keep(
        self,
        inputs: StepInputs,
        forward: Forward,
        batch: InputBatch,
        unfinished: set[int],
        counts: Sequence[int],
        logits: Tensor,
    ) -> None:
        """Keep what was sampled for the requests that are the graph's.

        Args:
            inputs, forward, batch, unfinished, counts: as for `fill`.
            logits: [sum of counts, V]. A request that enters the batch with drafts runs in a graph that samples after
                its last token only; its tokens are sampled from these.
        """
        assert inputs.sampled_tokens is not None
        sampled, first = inputs.sampled_tokens.tolist(), 0
        for row, places, count in zip(forward.rows, inputs.sampled_rows(forward, counts), counts, strict=True):
            if self._owns[batch.req_ids[row]] and row not in unfinished:
                if places is None:
                    self.tokens[row] = self._sample(logits[first : first + count], self._outside.get(row))
                else:
                    self.tokens[row] = sampled[places.start : places.stop]
            first += count

    def _sample(self, logits: Tensor, drawn: tuple[Tensor, Tensor] | None) -> list[int]:
        if drawn is None:
            return NF.greedy_tokens(logits).tolist()
        stages = self.stages
        return NF.sample_tokens(logits, *drawn, top_k="top_k" in stages, top_p="top_p" in stages).tolist()

    def verified(
        self, drafts: Sequence[Sequence[int]], generators: Mapping[int, torch.Generator]
    ) -> dict[int, list[int]]:
        """Return the tokens that each of the graph's requests gets: drafts as far as they were sampled, and one more.

        Random numbers of tokens behind those are given back.

        Args:
            drafts: of each row of the batch.
            generators: of the rows that have one of their own.
        """
        found = {row: standing(tokens, drafts[row]) for row, tokens in self.tokens.items()}
        for row, state in self._before.items():
            if len(found[row]) < len(self.tokens[row]):
                generators[row].set_state(state)
                self._numbers_again(generators[row], len(found[row]))
        return found

    @staticmethod
    def _numbers_again(generator: torch.Generator, count: int) -> None:
        for _ in range(count):
            torch.rand((), generator=generator, dtype=torch.float64)


def standing(tokens: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """Return the tokens up to the first that differs from the draft in its place, that one included.

    Args:
        tokens: one more than there are drafts.
        drafts: -1 stands for no token.
    """
    count = next(
        (n for n, (token, draft) in enumerate(zip(tokens, drafts, strict=False)) if token != draft), len(drafts)
    )
    return list(tokens[: count + 1])


# Below this vLLM's sampler takes a temperature for zero as well.
_GREEDY = 1e-5
