"""The rules of speculation: what is drafted from a text, and that accepting drafts changes no distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from pilotage.serving.speculation import metadata, register, rejection
from pilotage.serving.speculation.ngram import continuation

VOCAB = 7


def draft(tokens: Sequence[int], count: int = 3, shortest: int = 1, longest: int = 3) -> list[int]:
    return continuation(np.array(tokens, dtype=np.int32), count=count, shortest=shortest, longest=longest)


def test_what_followed_last_time() -> None:
    assert draft([1, 2, 3, 4, 1, 2]) == [3, 4, 1]
    assert draft([5, 2, 9, 5, 2, 8, 5, 2]) == [8, 5, 2], "the latest time counts"
    assert draft([5, 2, 9, 7, 2, 8, 5, 2]) == [9, 7, 2], "a longer match is better than a later one"
    assert draft([1, 2, 3]) == [] and draft([4]) == [] and draft([]) == []
    assert draft([7, 7]) == [7] and draft([7, 7, 7, 7]) == [7]
    assert draft([1, 2, 1], shortest=2) == []


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 3), st.integers(0, 2), st.integers(1, 5))
def test_drafts_by_the_plain_rule(tokens: list[int], shortest: int, more: int, count: int) -> None:
    want: list[int] = []
    for length in range(shortest + more, shortest - 1, -1):
        ends = [n for n in range(length, len(tokens)) if tokens[n - length : n] == tokens[-length:]]
        if ends:
            want = tokens[ends[-1] : ends[-1] + count]
            break
    assert draft(tokens, count, shortest, shortest + more) == want


def how(rows: int, temperature: float | None, generators: dict[int, torch.Generator] | None = None) -> SamplingMetadata:
    """Sampling of `rows` requests at one temperature, None for greedy; nothing else."""
    return SamplingMetadata(
        temperature=None if temperature is None else torch.full((rows,), temperature),
        all_greedy=temperature is None,
        all_random=temperature is not None,
        top_p=None,
        top_k=None,
        generators=generators or {},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(rows),
        presence_penalties=torch.zeros(rows),
        repetition_penalties=torch.ones(rows),
        output_token_ids=[[] for _ in range(rows)],
        spec_token_ids=[[] for _ in range(rows)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    register()


def verify(drafts: list[list[int]], logits: torch.Tensor, sampling: Any, draft_probs: Any = None) -> list[list[int]]:
    sampler = RejectionSampler(Sampler())
    out = sampler(metadata(drafts), draft_probs, logits.clone(), sampling).sampled_token_ids
    tokens, _ = RejectionSampler.parse_output(out, VOCAB)
    return list(tokens)


def test_greedy_keeps_what_it_would_have_said() -> None:
    best = [3, 1, 4, 2, 6, 5]
    logits = torch.nn.functional.one_hot(torch.tensor(best), VOCAB).float()
    # Requests of 2, 0 and 2 drafts: all right, none, wrong at the first; padding is never right.
    assert verify([[3, 1], [], [2, 6]][:2], logits[:4], how(2, None)) == [[3, 1, 4], [2]]
    assert verify([[3, 0], [2, 6]], logits, how(2, None)) == [[3, 1], [2, 6, 5]]
    assert verify([[-1, -1], [0, 6]], logits, how(2, None)) == [[3], [2]]


TRIALS = 4000


def first_two(draft_probs: torch.Tensor | None, drafts: list[list[int]]) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    """Sample requests with one draft each; returns counts of the first token, of the second after it, and the truth."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, VOCAB, generator=generator) * 1.5
    torch.manual_seed(17)
    found = verify(drafts, logits.repeat(TRIALS, 1), how(TRIALS, 0.8), draft_probs)
    first = np.bincount([tokens[0] for tokens in found], minlength=VOCAB)
    second = np.bincount([tokens[1] for tokens in found if len(tokens) > 1], minlength=VOCAB)
    return first, second, torch.softmax(logits / 0.8, -1)


def fits(counts: np.ndarray, truth: torch.Tensor) -> float:
    expected = truth.double().numpy()
    return float(chisquare(counts, expected / expected.sum() * counts.sum()).pvalue)


@pytest.mark.parametrize("token", [0, 2, 5])
def test_a_certain_draft_changes_no_distribution(token: int) -> None:
    first, second, truth = first_two(None, [[token]] * TRIALS)
    assert fits(first, truth[0]) > 1e-3 and fits(second, truth[1]) > 1e-3
    assert 0 < second.sum() < TRIALS  # some drafts stood, some did not


def test_a_drawn_draft_changes_no_distribution() -> None:
    proposal = torch.softmax(torch.linspace(-1, 2, VOCAB), -1)
    drawn = torch.multinomial(proposal, TRIALS, replacement=True, generator=torch.Generator().manual_seed(9))
    first, second, truth = first_two(proposal.repeat(TRIALS, 1), [[int(token)] for token in drawn])
    assert fits(first, truth[0]) > 1e-3 and fits(second, truth[1]) > 1e-3


def test_the_check_sees_a_replacement_drawn_from_the_wrong_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classic mistake: what replaces a rejected draft is drawn as if there had been no draft."""

    def careless(output: torch.Tensor, ends: torch.Tensor, *rest: Any, **named: Any) -> None:
        _, _, target_probs, inverse = rest[:4]
        output.copy_((target_probs * inverse).argmax(-1))

    from vllm.v1.sample import rejection_sampler

    monkeypatch.setattr(rejection_sampler.sample_recovered_tokens_kernel, "_impl", careless)
    first, _, truth = first_two(None, [[2]] * TRIALS)
    assert fits(first, truth[0]) < 1e-6


def test_a_seed_decides_whatever_else_is_in_the_batch() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))

    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(4)

    alone = [verify([[2]], logits, how(1, 1.0, {0: seeded()}))[0] for _ in range(3)]
    batch = verify([[], [2], [1]], torch.cat((logits[:1], logits, logits)), how(3, 1.0, {1: seeded()}))
    assert alone[0] == alone[1] == alone[2] == batch[1]


def test_values_are_repeated_for_drafts() -> None:
    out = torch.empty(3)
    rejection.expand(out, torch.tensor([0.0, 2.0, 3.0]), torch.tensor([1, 1, 3], dtype=torch.int32), 0, 1)
    assert out.tolist() == [1.0, 3.0, 3.0]
