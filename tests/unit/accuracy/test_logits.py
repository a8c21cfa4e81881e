"""Logit validation: forcing, retries, tolerances, the three-way rule, and sources that tell only the top."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pilotage.accuracy.arms import hf
from pilotage.accuracy.forcing import TopLogprobs, follow
from pilotage.accuracy.logits import logit_validation, multi_prompt_logit_validation
from pilotage.core.errors import BadInput, PilotageError
from pilotage.core.nouns import Status

VOCABULARY = 97


def logits_after(prefix: Sequence[int], seed: int = 0) -> Tensor:
    """A model: the next token's logits are a fixed random function of the tokens so far."""
    number = seed
    for token in prefix:
        number = (number * 1_000_003 + int(token) + 1) % (2**31)
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(number)) * 3


class Source:
    """Says what `logits_after` says, plus an error that is a function of the prefix."""

    def __init__(self, steps: int, *, noise: float = 0.0, sequences: bool = True, seed: int = 1) -> None:
        self.steps, self.noise, self.sequences, self.seed = steps, noise, sequences, seed
        self.prompts: list[list[list[int]]] = []

    def row(self, prefix: Sequence[int]) -> Tensor:
        return logits_after(prefix) + self.noise * logits_after(prefix, self.seed)

    def __call__(self, ids: Any) -> Any:
        self.prompts.append([list(map(int, row)) for row in ids])
        columns, said = [], []
        for row in ids:
            prefix, rows = list(map(int, row)), []
            for _ in range(self.steps):
                rows.append(self.row(prefix))
                prefix.append(int(rows[-1].argmax()))
            columns.append(torch.stack(rows))
            said.append(prefix)
        logits = torch.stack(columns, 1)
        return (logits, said) if self.sequences else logits


class ForcedSource(Source):
    def forced(self, ids: Any, tokens: Tensor) -> Tensor:
        return torch.stack(
            [
                torch.stack([self.row([*map(int, row), *tokens[:step, i].tolist()]) for step in range(len(tokens))])
                for i, row in enumerate(ids)
            ],
            1,
        )


IDS = torch.tensor([[5, 6, 7], [8, 9, 10]])


def truth(ids: Any = IDS, steps: int = 12, noise: float = 0.0, seed: int = 2) -> Tensor:
    tokens = Source(steps)(ids)[0].argmax(-1)
    return ForcedSource(steps, noise=noise, seed=seed).forced(ids, tokens)


@pytest.mark.parametrize("sequences", [True, False])
def test_retries_and_one_pass_give_the_same_numbers(sequences: bool) -> None:
    expected = truth()
    tokens = expected.argmax(-1)
    retried = follow(IDS, Source(12, noise=0.3, sequences=sequences), tokens)
    forced = follow(IDS, ForcedSource(12, noise=0.3), tokens)
    assert retried.calls > 2 and retried.divergences, "the noise must lead it astray"
    assert forced.calls == 1 and not forced.divergences
    assert torch.equal(retried.found, forced.found)
    # Asked again with the reference's tokens up to and including the divergence.
    assert retried.calls == len(retried.divergences) + (max(retried.divergences) < 11)


def test_every_retry_starts_after_the_divergence() -> None:
    expected = truth()
    tokens = expected.argmax(-1)
    source = Source(12, noise=0.3)
    found = follow(IDS, source, tokens, how="retry")
    for prompts, divergence in zip(source.prompts[1:], found.divergences, strict=False):
        for row, prompt in enumerate(prompts):
            assert prompt == [*IDS[row].tolist(), *tokens[: divergence + 1, row].tolist()]


def test_short_answers_are_continued_and_long_ones_cut() -> None:
    expected = truth()
    tokens = expected.argmax(-1)
    whole = follow(IDS, Source(12), tokens)
    short = follow(IDS, Source(5), tokens)
    long = follow(IDS, Source(40), tokens)
    assert (whole.calls, short.calls, long.calls) == (1, 3, 1)
    for found in (whole, short, long):
        assert torch.equal(found.found, expected)


def test_prompts_of_different_lengths() -> None:
    ids = [[5], [6, 7, 8, 9]]
    expected = truth(ids)
    found = follow(ids, Source(12, noise=0.3), expected.argmax(-1))
    assert torch.equal(found.found, ForcedSource(12, noise=0.3).forced(ids, expected.argmax(-1)))


def test_a_source_that_ends_leaves_the_rest_not_measured() -> None:
    class Ending(Source):
        def __call__(self, ids: Any) -> Any:
            if len(ids[0]) > 5:
                return torch.empty(0, 2, VOCABULARY), [[], []]
            return super().__call__(ids)

    result = logit_validation(IDS, Ending(4), truth())
    assert result.status is Status.NOT_MEASURED and not result
    assert "stopped 8 steps before" in result.verdicts[-1].bound_source
    assert result.measured is Status.PASS
    with pytest.raises(PilotageError, match="no step"):
        follow(torch.tensor([[1] * 9] * 2), Ending(4), truth().argmax(-1))


def test_two_way_tolerances_by_top_k() -> None:
    expected = truth()
    assert logit_validation(IDS, Source(12), expected)
    # 2.5% of the row's largest logit: inside the tolerance of the whole vocabulary, outside that of the top 50.
    shift = 0.025 * expected.abs().amax(-1, keepdim=True)

    def at(place: str) -> Callable[[Any], Tensor]:
        index = expected.argmin(-1) if place == "bottom" else expected.argmax(-1)
        return lambda ids: expected.scatter_add(-1, index[..., None], shift)

    bottom, top = (logit_validation(IDS, at(place), expected) for place in ("bottom", "top"))
    assert bottom.status is Status.PASS
    assert [v.metric for v in top.verdicts if v.status is Status.FAIL] == ["top_5_error", "top_50_error"]
    assert logit_validation(IDS, at("top"), expected, tol_map={5: 0.05})
    assert not logit_validation(IDS, at("top"), expected, tol_map={5: (1e-5, 0.011)})
    found = next(v for v in top.verdicts if v.metric == "top_5_error")
    row = expected.reshape(-1, VOCABULARY)[found.evidence["step"] * 2 + found.evidence["batch_row"]]
    assert found.estimate == pytest.approx(0.025 - 1e-5 / float(row.abs().amax()), rel=1e-4)


def test_divergence_is_allowed_by_an_ulp_and_by_what_is_said() -> None:
    expected = truth()
    first, second = expected.topk(2).indices.unbind(-1)
    level = expected.gather(-1, first[..., None])

    def preferring(by: float) -> Callable[[Any], tuple[Tensor, Tensor]]:
        logits = expected.scatter(-1, second[..., None], level + by)
        return lambda ids: (logits, first.T)

    loose: dict[int | None, float] = {None: 10.0}
    # One bf16 ulp at a largest logit of 4 to 8 is 2^-5.
    assert float(level.amin()) > 4 and float(level.amax()) < 16
    assert logit_validation(IDS, preferring(2**-6), expected, loose)
    assert logit_validation(IDS, preferring(0.2), expected, loose).status is Status.FAIL
    assert logit_validation(IDS, preferring(0.2), expected, loose, divergence_difference_tol=0.21)
    assert not logit_validation(IDS, preferring(2**-6), expected, loose, divergence_difference_tol=0.001)
    result = logit_validation(IDS, preferring(0.2), expected, loose)
    assert result.verdicts[-1].evidence["rows_diverging"] == 24
    assert not any(row["top1"] for row in result.rows)


@pytest.mark.parametrize(("noise", "status"), [(0.01, Status.PASS), (0.011, Status.PASS), (0.02, Status.FAIL)])
def test_three_way(noise: float, status: Status) -> None:
    expected = truth(steps=32)
    baseline = truth(steps=32, noise=0.01, seed=5)
    result = logit_validation(IDS, ForcedSource(32, noise=noise), expected, baseline_logits=baseline)
    assert result.status is status
    assert result.verdicts[0].estimate == pytest.approx(noise / 0.01, rel=0.15)
    assert 0 < result.verdicts[0].evidence["bhattacharyya"] <= 1


def test_three_way_sees_one_wrong_step_and_nan() -> None:
    expected, baseline = truth(steps=32), truth(steps=32, noise=0.01, seed=5)
    wrong = truth(steps=32, noise=0.01, seed=6)
    wrong[17, 1] += 0.4 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0))
    result = logit_validation(IDS, lambda ids: (wrong, expected.argmax(-1).T), expected, baseline_logits=baseline)
    found = next(v for v in result.verdicts if v.metric == "worst_row")
    assert found.status is Status.FAIL
    assert (found.evidence["step"], found.evidence["batch_row"]) == (17, 1)
    wrong[17, 1, 3] = float("nan")
    result = logit_validation(IDS, lambda ids: (wrong, expected.argmax(-1).T), expected, baseline_logits=baseline)
    assert result.status is Status.FAIL


def test_controls_set_the_bound() -> None:
    expected, baseline = truth(steps=24), truth(steps=24, noise=0.01, seed=5)
    source = ForcedSource(24, noise=0.015)
    alone = logit_validation(IDS, source, expected, baseline_logits=baseline)
    # Clean implementations of this model are themselves up to 1.6 times as far off as the baseline.
    controls = [truth(steps=24, noise=0.01 * (1 + i / 15), seed=20 + i) for i in range(10)]
    calibrated = logit_validation(IDS, source, expected, baseline_logits=baseline, controls=controls)
    assert alone.status is Status.FAIL
    assert calibrated.status is Status.PASS
    assert "10 clean controls" in calibrated.verdicts[0].bound_source


def test_several_prompts_are_pooled_and_each_can_fail() -> None:
    prompts = [IDS, torch.tensor([[11, 12, 13, 14], [3, 4, 5, 6]]), [[9], [2, 3]]]
    expected = [truth(ids) for ids in prompts]
    good = multi_prompt_logit_validation(prompts, ForcedSource(12), expected)
    assert good and len(good.rows) == 72 and good.calls == 3
    wrong = [x.clone() for x in expected]
    wrong[1][4, 1, int(wrong[1][4, 1].argmin())] -= 9
    bad = multi_prompt_logit_validation(prompts, ForcedSource(12), wrong)
    found = next(v for v in bad.verdicts if v.metric == "top_all_error")
    assert (found.evidence["prompt"], found.evidence["step"], found.evidence["batch_row"]) == (1, 4, 1)


def top_of(logits: Tensor, k: int, said: Tensor | None = None) -> TopLogprobs:
    logprobs = logits.double().log_softmax(-1)
    top = logprobs.topk(k)
    return TopLogprobs(ids=top.indices, values=top.values, least=top.values.amin(-1))


class TopSource(ForcedSource):
    """Tells the top 20 as log-probabilities, as a server does."""

    def __call__(self, ids: Any) -> Any:
        logits, said = super().__call__(ids)
        return top_of(logits, 20), said

    forced = None  # type: ignore[assignment]


def test_the_top_is_judged_and_the_rest_not_measured() -> None:
    expected = truth(steps=32)
    baseline = truth(steps=32, noise=0.01, seed=5)

    class Top(Source):
        def __call__(self, ids: Any) -> Any:
            logits, said = super().__call__(ids)
            return top_of(logits, 20), said

    good = logit_validation(IDS, Top(32, noise=0.01), expected, {5: 0.05}, baseline_logits=baseline)
    assert good.status is Status.NOT_MEASURED and good.measured is Status.PASS
    assert [v.status for v in good.verdicts if v.metric == "rest"] == [Status.NOT_MEASURED]
    assert "20 of 97" in good.verdicts[-1].bound_source
    bad = logit_validation(IDS, Top(32, noise=0.05), expected, {5: 0.05}, baseline_logits=baseline)
    assert bad.status is Status.FAIL and bad.measured is Status.FAIL
    # What was not returned is not known to be wrong either.
    wide = logit_validation(IDS, Top(32), expected, {5: 1e-6, 50: 1e-6})
    statuses = {v.metric: v.status for v in wide.verdicts}
    assert statuses["top_5_error"] is Status.PASS
    assert statuses["top_50_error"] is Status.NOT_MEASURED


def test_a_missing_token_fails_where_its_bound_says_so() -> None:
    expected = truth()
    swapped = expected.clone()
    top = expected.argmax(-1, keepdim=True)
    swapped.scatter_(-1, top, -50.0)
    result = logit_validation(IDS, lambda ids: (top_of(swapped, 20), expected.argmax(-1).T), expected, {5: 0.05})
    found = {v.metric: v for v in result.verdicts}
    assert found["top_5_error"].status is Status.FAIL
    assert found["divergence_difference"].status is Status.FAIL


def test_a_shift_of_all_logits_is_no_error_of_logprobs() -> None:
    expected = truth()
    result = logit_validation(IDS, lambda ids: (top_of(expected + 7, 20), expected.argmax(-1).T), expected, {5: 1e-6})
    assert result.measured is Status.PASS


@pytest.mark.parametrize(
    ("generate", "says"),
    [
        (lambda ids: torch.zeros(3, 5, VOCABULARY), "expected \\[steps, 2, vocabulary\\]"),
        (lambda ids: "text", "str, not logits"),
        (lambda ids: (torch.zeros(3, 2, VOCABULARY), [[1], [2]]), "3 steps of logits"),
        (lambda ids: torch.zeros(12, 2, 7), "a vocabulary of 7"),
    ],
)
def test_answers_that_do_not_fit_are_refused(generate: Any, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        logit_validation(IDS, generate, truth())


def test_shapes_of_the_reference_are_checked() -> None:
    with pytest.raises(BadInput, match="expected_logits"):
        logit_validation(IDS, Source(12), truth()[:, :1])
    with pytest.raises(BadInput, match="baseline_logits"):
        logit_validation(IDS, Source(12), truth(), baseline_logits=truth()[:5])
    with pytest.raises(BadInput, match="one pass"):
        logit_validation(IDS, Source(12), truth(), how="one_pass")


def test_hugging_face_free_and_forced(tiny: Callable[..., Path]) -> None:
    model = hf.load(tiny("gemma3"), torch.float32)
    ids = [[2, 40, 41, 42], [2, 77]]
    logits, said = hf.generate(model, ids, 6)
    assert tuple(logits.shape) == (6, 2, model.config.vocab_size)
    assert torch.equal(said.T, logits.argmax(-1))
    torch.testing.assert_close(hf.forced(model, ids, said.T), logits, rtol=1e-4, atol=1e-4)
    assert logit_validation(ids, functools.partial(hf.generate, model, steps=6), logits, dtype=torch.float32)
