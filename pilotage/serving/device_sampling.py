"""Sampling inside the graph: which requests it serves, and the numbers that it needs for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from pilotage.core.errors import Unsupported

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_input_batch import InputBatch

    from pilotage.core.config import TargetConfig
    from pilotage.serving.batch import Forward, StepInputs


def require_supported(vllm_config: VllmConfig, config: TargetConfig) -> None:
    """Raise where sampling in the graph cannot be combined with what else is configured.

    Raises:
        Unsupported: with speculation, or where log-probabilities of processed logits are asked for.
    """
    if config.on_device_sampling_config is None:
        return
    where = "on_device_sampling_config"
    if vllm_config.speculative_config is not None:
        raise Unsupported(
            "drafts are verified outside the graph, so nothing is sampled inside it", where=where, do="remove one"
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
    """

    def __init__(self, stages: Mapping[str, bool], *, force_key: str) -> None:
        self.stages = frozenset(name for name, on in stages.items() if on)
        self.force_key = force_key
        self.tokens: dict[int, int] = {}
        self._owns: dict[str, bool] = {}

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
        for req_id in finished:
            self._owns.pop(req_id, None)

    def fill(
        self, inputs: StepInputs, forward: Forward, batch: InputBatch, states: Mapping[str, Any], unfinished: set[int]
    ) -> None:
        """Write parameters and random numbers of a forward's requests.

        Args:
            inputs: of the graph.
            forward: its rows.
            batch, states: vLLM's batch and request states.
            unfinished: rows of the batch without a token to sample; they use up no random number.
        """
        assert inputs.sampling_params is not None and inputs.sampling_noise is not None
        for index, row in enumerate(forward.rows):
            req_id = batch.req_ids[row]
            params = states[req_id].sampling_params
            owned = self._owns.get(req_id)
            if owned is None:
                owned = self._owns[req_id] = self.owns(params)
            if not owned or row in unfinished or params.temperature < _GREEDY:
                continue  # left at temperature 0
            inputs.sampling_params[index] = torch.tensor(
                [float(max(params.top_k, 0)), params.top_p, params.temperature]
            )
            inputs.sampling_noise[index] = torch.rand((), generator=batch.generators.get(row), dtype=torch.float64)

    def keep(self, inputs: StepInputs, forward: Forward, batch: InputBatch, unfinished: set[int]) -> None:
        """Keep what a graph sampled for the requests that are the graph's."""
        assert inputs.sampled_tokens is not None
        for row, token in zip(forward.rows, inputs.sampled_tokens[: len(forward.rows)].tolist(), strict=True):
            if self._owns[batch.req_ids[row]] and row not in unfinished:
                self.tokens[row] = token


# Below this vLLM's sampler takes a temperature for zero as well.
_GREEDY = 1e-5
