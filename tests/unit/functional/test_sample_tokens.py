"""The sampler inside the graph: which tokens may come, and how often they do."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pilotage.functional as NF

V = 13
DRAWS = 20_000


def allowed(logits: torch.Tensor, top_k: int, top_p: float, temperature: float) -> torch.Tensor:
    """Probabilities [V] by the plain reading of the parameters."""
    probabilities = (logits / temperature).softmax(-1)
    if top_k:
        bound = probabilities.sort(descending=True).values[top_k - 1]
        probabilities = torch.where(probabilities >= bound, probabilities, 0.0)
        probabilities = probabilities / probabilities.sum()
    kept, mass = torch.zeros(V), 0.0
    for token in probabilities.argsort(descending=True).tolist():
        if mass >= top_p:
            break
        kept[token], mass = probabilities[token], mass + float(probabilities[token])
    return kept / kept.sum()


@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature"), [(0, 1.0, 1.0), (4, 1.0, 0.7), (0, 0.6, 1.3), (5, 0.8, 1.0), (1, 1.0, 2.0)]
)
def test_tokens_come_as_often_as_they_should(top_k: int, top_p: float, temperature: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(V, generator=generator) * 1.5
    rows, params = logits.expand(DRAWS, V), torch.tensor([[top_k, top_p, temperature]]).expand(DRAWS, 3)
    noise = torch.rand(DRAWS, generator=generator, dtype=torch.float64)
    expected = allowed(logits, top_k, top_p, temperature)
    for stages in ({}, {"top_k": False}, {"top_p": False}, {"top_k": False, "top_p": False}):
        if (top_k and stages.get("top_k") is False) or (top_p < 1 and stages.get("top_p") is False):
            continue
        counts = NF.sample_tokens(rows, params, noise, **stages).bincount(minlength=V)
        assert counts[expected == 0].sum() == 0
        likely = expected > 0
        statistic = ((counts[likely] - DRAWS * expected[likely]) ** 2 / (DRAWS * expected[likely])).sum()
        freedom = int(likely.sum()) - 1
        assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 5, (stages, counts)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    noise=st.sampled_from([0.0, 0.5, 1 - 2**-53]),
    top_k=st.integers(0, V),
    top_p=st.floats(0.01, 1.0),
    temperature=st.sampled_from([0.0, 0.01, 1.0, 50.0]),
)
def test_only_tokens_that_may_come(seed: int, noise: float, top_k: int, top_p: float, temperature: float) -> None:
    logits = torch.randn(V, generator=torch.Generator().manual_seed(seed))
    logits[seed % V] = float("-inf")
    params = torch.tensor([[float(top_k), top_p, temperature]])
    (token,) = NF.sample_tokens(logits[None], params, torch.tensor([noise], dtype=torch.float64)).tolist()
    if temperature == 0 or top_k == 1:
        assert token == int(logits.argmax())
    else:
        assert token != seed % V
        assert allowed(logits, top_k, min(1.0, top_p + 1e-5), temperature)[token] > 0


def test_a_row_does_not_depend_on_the_others() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(6, 50, generator=generator)
    params = torch.tensor([[0, 1, 1], [3, 1, 1], [0, 0.5, 1], [0, 1, 0], [9, 0.9, 0.5], [0, 1, 2]], dtype=torch.float32)
    noise = torch.rand(6, generator=generator, dtype=torch.float64)
    together = NF.sample_tokens(logits, params, noise)
    alone = [NF.sample_tokens(logits[i : i + 1], params[i : i + 1], noise[i : i + 1]) for i in range(6)]
    assert together.tolist() == torch.cat(alone).tolist()
