"""Drawn drafts: their distribution, what is handed to the verification, and that the two together change nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pilotage.serving.speculation import choice as choices
from pilotage.serving.speculation import rejection
from pilotage.serving.speculation.choice import Choice
from pilotage.serving.speculation.eagle3 import Lane

VOCAB = 6


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "_agreed", lambda tokens: tokens)


def batch(*temperatures: float) -> Any:
    names = [f"r{n}" for n in range(len(temperatures))]
    return SimpleNamespace(
        req_ids=names,
        greedy_reqs={name for name, t in zip(names, temperatures, strict=True) if t == 0},
        temperature_cpu=np.array(temperatures),
        generators={},
    )


def far(counts: torch.Tensor, chances: torch.Tensor) -> bool:
    """Whether a chi-square of counts is beyond any doubt."""
    mean = counts.sum() * chances
    used = mean > 0
    assert counts[~used].sum() == 0
    statistic = float(((counts - mean).square() / mean)[used].sum())
    return statistic > VOCAB + 6 * (2 * VOCAB) ** 0.5


def test_a_greedy_request_gets_the_most_likely_token_and_others_a_draw() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.9, -1.0, float("-inf")]] * 2)
    drawn = Choice(drawn=True)
    counts = torch.zeros(VOCAB)
    for _ in range(4000):
        drawn.forget("r1")
        found = drawn.choose(batch(0.0, 0.7), [0, 1], logits)
        assert found[0] == 1
        counts[found[1]] += 1
    assert not far(counts, (logits[1] / 0.7).softmax(-1)) and counts[5] == 0
    certain = Choice(drawn=False)
    assert certain.choose(batch(0.7), [0], logits[:1]) == {0: 1}
    assert certain.probabilities(["r0"], [[1]], VOCAB) is None


def test_probabilities_belong_to_the_drafts_that_were_drawn() -> None:
    drawn = Choice(drawn=True)
    rows = batch(1.0, 0.0, 1.0)
    first, second = torch.randn(3, VOCAB), torch.randn(3, VOCAB)
    a, b = drawn.choose(rows, [0, 1, 2], first), drawn.choose(rows, [0, 1, 2], second)
    drawn.forget("r2")
    drafts = [[a[0], b[0]], [a[1], -1], [a[2]]]
    found = drawn.probabilities(rows.req_ids, drafts, VOCAB)
    assert found is not None and found.shape == (5, VOCAB)
    torch.testing.assert_close(found[:2], torch.stack((first[0], second[0])).softmax(-1))
    one_hot = torch.eye(VOCAB)
    assert torch.equal(found[2], one_hot[a[1]]) and not found[3].any() and torch.equal(found[4], one_hot[a[2]])


def test_drawn_and_verified_tokens_are_the_models_own() -> None:
    """Leviathan's rule over our kernels: whatever the draft's distribution, the output has the target's."""
    torch.manual_seed(1)
    target = torch.tensor([0.4, 0.05, 0.25, 0.3, 0.0, 0.0])
    logits = torch.tensor([[0.0, 1.5, -1.0, 0.5, 1.0, -2.0]])
    drawn, counts, stood = Choice(drawn=True), torch.zeros(VOCAB), 0
    ends = torch.tensor([1])
    for _ in range(6000):
        drawn.forget("r0")
        token = drawn.choose(batch(1.0), [0], logits)[0]
        chances = drawn.probabilities(["r0"], [[token]], VOCAB)
        replacement = torch.zeros(1, dtype=torch.int64)
        inverse = 1 / torch.empty(1, VOCAB).exponential_()
        rejection.recovered(replacement, ends, torch.tensor([token]), chances, target[None], inverse, VOCAB)
        output = torch.full((1, 2), -1)
        rejection.random(
            output, ends, torch.tensor([token]), chances, target[None], torch.tensor([[5]]), replacement,
            torch.rand(1, dtype=torch.float64), torch.tensor([False]), 1, VOCAB, None,
        )  # fmt: skip
        counts[output[0, 0]] += 1
        stood += int(output[0, 1] == 5)
    assert not far(counts, target), counts
    expected = float(torch.minimum(target, logits[0].softmax(-1)).sum())
    assert abs(stood / 6000 - expected) < 0.04, "and drafts stand as often as the two distributions overlap"


def tokens(*ids: int) -> Any:
    return np.array(ids, dtype=np.int32)


def test_a_lane_follows_its_request() -> None:
    lane = Lane(0, tokens(11, 12, 13, 14))
    assert lane.cut(3, tokens(11, 12, 13, 20, 21)) == 3 and lane.tokens.tolist() == [11, 12, 13]  # a draft fell
    assert lane.cut(0, tokens(11, 12, 13)) == 0 and (lane.first, lane.tokens.size) == (0, 0)  # computed again
    lane = Lane(8, tokens(18, 19))
    assert lane.cut(10, tokens(*range(10, 30))) == 2  # behind a prefix that was found in the cache
    assert lane.cut(16, tokens(*range(10, 30))) == 0 and lane.first == 16  # and a gap: it begins anew
    lane = Lane(8, tokens(18, 19))
    assert lane.cut(4, tokens(*range(10, 30))) == 0 and lane.first == 4
    lane = Lane(0, tokens(1, 2, 3))
    assert lane.cut(3, tokens(1, 9, 3, 4)) == 0 and lane.first == 3  # another text under the same name
