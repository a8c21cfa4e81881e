"""Sampling in the graph with drafts: which of them stand, and that a request uses one random number a token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pilotage.serving.batch import Forward, LayerGroup, StepInputs
from pilotage.serving.device_sampling import DeviceSampling, standing

VOCAB = 11
STAGES = {"temperature": True, "top_k": True, "top_p": True}


@pytest.mark.parametrize(
    ("tokens", "drafts", "expected"),
    [
        ([5], [], [5]),
        ([5, 6, 7], [5, 6], [5, 6, 7]),
        ([5, 6, 7], [5, 9], [5, 6]),
        ([5, 6, 7], [4, 6], [5]),
        ([5, 6], [-1], [5]),
    ],
)
def test_drafts_stand_up_to_the_first_that_was_not_sampled(
    tokens: list[int], drafts: list[int], expected: list[int]
) -> None:
    assert standing(tokens, drafts) == expected


def params(temperature: float) -> Any:
    return SimpleNamespace(
        **{"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "min_tokens": 0, "logprobs": None},
        **dict.fromkeys(("presence_penalty", "frequency_penalty"), 0.0),
        **{"repetition_penalty": 1.0, "extra_args": None},
        **dict.fromkeys(("logit_bias", "allowed_token_ids", "bad_words", "structured_outputs", "logprob_token_ids")),
    )


def run(graph: DeviceSampling, batch: Any, kind: str, counts: list[int], drafts: list[list[int]]) -> dict[int, Any]:
    """Play one step of requests whose logits are those of their row of the batch; returns the tokens they get."""
    groups = [LayerGroup(layer_names=("a",), block_size=4, max_blocks_per_seq=8)]
    rows = tuple(range(len(counts)))
    size = 12
    inputs = StepInputs(
        "decode" if kind == "decode" else "prefill",
        size,
        num_rows=len(rows),
        groups=groups,
        decode_token_threshold=4 if kind == "decode" else 1,
    )
    inputs.add_sampling()
    forward = Forward(kind=inputs.kind, rows=rows, num_tokens=tuple(counts))
    states = {name: SimpleNamespace(sampling_params=batch.params[name]) for name in batch.req_ids}
    graph.begin(())
    graph.fill(inputs, forward, batch, states, set(), counts)
    logits = torch.cat([batch.logits[row].expand(count, VOCAB) for row, count in zip(rows, counts, strict=True)])
    assert inputs.sampling_params is not None and inputs.sampling_noise is not None
    import pilotage.functional as NF

    # What the graph would compute: rows of all tokens where it verifies, else of each request's last one.
    ends = torch.tensor(counts).cumsum(0) - 1
    seen = logits if inputs.verifies else logits[ends]
    count = len(seen)
    sampled = NF.sample_tokens(seen, inputs.sampling_params[:count], inputs.sampling_noise[:count])
    inputs.sampled_tokens = torch.nn.functional.pad(sampled, (0, inputs.num_sampled - count))
    graph.keep(inputs, forward, batch, set(), counts, logits)
    return graph.verified(drafts, batch.generators)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_a_seed_gives_the_same_tokens_however_many_drafts_fall(kind: str) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, VOCAB, generator=draw)

    def batch() -> Any:
        generators = {0: torch.Generator().manual_seed(7)}
        return SimpleNamespace(
            req_ids=["a", "b"], generators=generators, logits=logits, params={"a": params(1.0), "b": params(0.0)}
        )

    plain, graph = batch(), DeviceSampling(STAGES, force_key="force")
    expected: list[int] = []
    for _ in range(40):
        found = run(graph, plain, kind, [1, 1], [[], []])
        expected += found[0]
        assert found[1] == [int(logits[1].argmax())]
    assert len(set(expected)) > 3

    drafted, graph = batch(), DeviceSampling(STAGES, force_key="force")
    said: list[int] = []
    while len(said) < 36:
        # Right drafts, of which a random one is wrong at times.
        guess = expected[len(said) : len(said) + 3]
        if torch.rand((), generator=draw) < 0.7:
            guess[int(torch.randint(3, (), generator=draw))] = VOCAB
        best = int(logits[1].argmax())
        found = run(graph, drafted, kind, [4, 3], [guess, [best, VOCAB]])
        assert found[1] == [best, best]
        said += found[0]
    assert said == expected[: len(said)]
