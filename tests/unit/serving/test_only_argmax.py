"""When the largest logit is all that vLLM's sampler would take."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata

from pilotage.serving.sampling import ForcedTokens, only_argmax


def processors() -> list[Any]:
    device = torch.device("cpu")
    config: Any = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 16))
    return [
        LogitBiasLogitsProcessor(config, device, False),
        MinTokensLogitsProcessor(config, device, False),
        ForcedTokens(config, device, False),
    ]


def metadata(found: list[Any]) -> SamplingMetadata:
    nothing = torch.empty(0)
    return SamplingMetadata(
        temperature=None,
        all_greedy=True,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=nothing,
        output_token_ids=[[]],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(found),
    )


def test_a_plain_greedy_batch() -> None:
    assert only_argmax(metadata(processors()))
    assert only_argmax(metadata([]))


@pytest.mark.parametrize(
    "change",
    [
        {"all_greedy": False},
        {"max_num_logprobs": 0},
        {"logprob_token_ids": {0: [3]}},
        {"no_penalties": False},
        {"allowed_token_ids_mask": torch.zeros(1, 16, dtype=torch.bool)},
        {"bad_words_token_ids": {0: [[1]]}},
        {"thinking_budget_state_holder": SimpleNamespace(has_tracked_requests=lambda: True)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_else_was_asked_for_goes_to_the_sampler(change: dict[str, Any]) -> None:
    assert not only_argmax(replace(metadata(processors()), **change))


def test_a_processor_with_work_or_unknown_goes_to_the_sampler() -> None:
    for number, (name, value) in enumerate(
        (("biases", {0: {1: 2.0}}), ("min_toks", {0: (3, [], {1}, False)}), ("forced", {0: ([1], [])}))
    ):
        found = processors()
        setattr(found[number], name, value)
        assert not only_argmax(metadata(found))
    busy = processors()
    busy[2].sampled = {0: 3}
    assert not only_argmax(metadata(busy))

    class Unknown(MinTokensLogitsProcessor.__mro__[1]):  # type: ignore[misc]
        def __init__(self) -> None: ...
        def apply(self, logits: Any) -> Any: ...
        def update_state(self, batch_update: Any) -> None: ...
        def is_argmax_invariant(self) -> bool:
            return False

    assert not only_argmax(metadata([*processors(), Unknown()]))
