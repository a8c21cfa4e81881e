"""Greedy agreement: equal, tie, different; and that nothing passes by being missing."""

from __future__ import annotations

import pytest
import torch

from pilotage.core.nouns import Status
from pilotage.voyage.agreement import agreement, verdict


def rows(*tops: tuple[int, float, int, float]) -> torch.Tensor:
    """Logits over 50 words in which two are set: (word, logit, other word, logit)."""
    logits = torch.randn(len(tops), 50, generator=torch.Generator().manual_seed(0)) * 0.1
    for row, (first, a, second, b) in zip(logits, tops, strict=True):
        row[first], row[second] = a, b
    return logits


def test_equal_tokens_agree() -> None:
    found = agreement([1, 2, 7, 9], 2, rows((7, 5.0, 3, 1.0), (9, 5.0, 3, 4.9)), None)
    assert found.agrees is True and found.differing == [] and found.compared == 2


def test_a_near_tie_in_fp32_is_a_tie_and_a_gap_is_a_difference() -> None:
    tie = agreement([1, 2, 3], 2, rows((7, 5.0, 3, 4.99995)), None)
    assert tie.agrees == "tie" and tie.differing[0]["reference"] == 7
    far = agreement([1, 2, 3], 2, rows((7, 5.0, 3, 4.999)), None)
    assert far.agrees is False
    assert verdict([tie], dtype="float32").status is Status.PASS
    assert verdict([tie, far], dtype="float32").status is Status.FAIL


def test_in_bf16_the_baselines_own_error_says_what_a_tie_is() -> None:
    expected = rows((7, 5.0, 3, 4.9))
    noise = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    noisy = agreement([1, 2, 3], 2, expected, expected + 0.03 * noise)
    assert noisy.agrees == "tie"
    exact = agreement([1, 2, 3], 2, expected, expected + 0.003 * noise)
    assert exact.agrees is False


def test_one_far_token_hides_behind_no_tie() -> None:
    found = agreement([1, 2, 3, 4], 2, rows((7, 5.0, 3, 4.99995), (9, 5.0, 4, 1.0)), None)
    assert found.agrees is False and len(found.differing) == 2


def test_a_token_after_a_difference_is_judged_by_its_own_prefix() -> None:
    # The second row is what the reference says after OUR first token, so it agrees again.
    found = agreement([1, 2, 3, 9], 2, rows((7, 5.0, 3, 4.99999), (9, 5.0, 4, 1.0)), None)
    assert found.agrees == "tie" and len(found.differing) == 1


def test_not_a_number_is_a_difference() -> None:
    logits = rows((7, 5.0, 3, 4.0))
    logits[0, 3] = float("nan")
    found = agreement([1, 2, 4], 2, logits, None)
    assert found.agrees is False


def test_nothing_compared_is_not_measured() -> None:
    assert verdict([], dtype="bfloat16").status is Status.NOT_MEASURED


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens"):
        agreement([1, 2, 3, 4], 2, rows((7, 5.0, 3, 4.0)), None)
