"""`assert_close_three_way` on errors of known law: how often it is wrong, and what it must never do."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pilotage.accuracy import simulate
from pilotage.accuracy.testing import NotMeasured, assert_close, assert_close_three_way


def noisy(n: int | tuple[int, ...], seed: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    expected = torch.randn(n, generator=generator)
    target, baseline = (expected + 0.02 * factor * torch.randn(n, generator=generator) for factor in (scale, 1.0))
    return target, expected, baseline


@pytest.mark.parametrize("law", simulate.LAWS)
@pytest.mark.parametrize("n", [64, 4096])
def test_a_perfect_target_is_accepted(n: int, law: str) -> None:
    counts = simulate.outcomes(law, n, 1.0, range(200))
    # "spread" has errors whose size varies e-fold between elements: the hardest law kept here.
    assert counts["pass"] >= (190 if law == "spread" else 198), counts


@pytest.mark.parametrize("law", ["gaussian", "uniform", "rounding"])
def test_a_larger_error_fails_at_100000_elements(law: str) -> None:
    assert simulate.outcomes(law, 100_000, 1.3, range(20))["fail"] == 20


def test_three_times_the_error_never_passes_at_256_elements() -> None:
    assert simulate.outcomes("gaussian", 256, 3.0, range(100))["pass"] == 0


def test_a_target_that_is_the_baseline_passes() -> None:
    _, expected, baseline = noisy((16, 64), 0)
    verdicts = assert_close_three_way(target=baseline, expected=expected, baseline=baseline, rtol=0.0, name="same")
    assert all(verdict.status.value == "pass" for verdict in verdicts)


@pytest.mark.parametrize("where", ["target", "baseline", "both"])
def test_an_outlier_hides_nothing(where: str) -> None:
    """At 150,000 elements one error of 300 sigma lifts the usual histogram overlap of a 1.3x error to a pass."""
    target, expected, baseline = noisy(150_000, 3, scale=1.3)
    if where in ("target", "both"):
        target[77] += 300 * 0.02
    if where in ("baseline", "both"):
        baseline[99 if where == "baseline" else 77] += 300 * 0.02
    with pytest.raises(AssertionError) as caught:
        assert_close_three_way(target=target, expected=expected, baseline=baseline, rtol=0.01, name="x")
    assert not isinstance(caught.value, NotMeasured)


def test_an_outlier_alone_fails() -> None:
    target, expected, baseline = noisy(150_000, 4)
    target[5] += 300 * 0.02
    with pytest.raises(AssertionError, match="no single element far off"):
        assert_close_three_way(target=target, expected=expected, baseline=baseline, rtol=0.01, name="x")


def test_one_wrong_row_fails() -> None:
    target, expected, baseline = noisy((512, 256), 5)
    target[300] += 5 * 0.02 * torch.randn(256, generator=torch.Generator().manual_seed(9))
    with pytest.raises(AssertionError, match="fail: x: no single row far off"):
        assert_close_three_way(target=target, expected=expected, baseline=baseline, rtol=0.0, name="x")


def test_rtol_is_a_floor() -> None:
    target, expected, _ = noisy(1000, 6)
    assert_close_three_way(target=target, expected=expected, baseline=expected, rtol=0.05, name="x")
    with pytest.raises(AssertionError, match="rms_ratio"):
        assert_close_three_way(target=target, expected=expected, baseline=expected, rtol=0.001, name="x")
    exact = expected.double()
    assert_close_three_way(target=exact.float(), expected=expected, baseline=expected, name="x")


def test_undecidable_is_not_measured_and_never_a_pass() -> None:
    outcomes = [0, 0]
    for seed in range(20):
        target, expected, baseline = noisy(64, seed, scale=2.2)
        try:
            assert_close_three_way(target=target, expected=expected, baseline=baseline, rtol=0.0, name="x")
        except NotMeasured:
            outcomes[0] += 1
        except AssertionError:
            outcomes[1] += 1
    assert issubclass(NotMeasured, AssertionError)
    assert outcomes[0] >= 10 and sum(outcomes) >= 18
    with pytest.raises(NotMeasured):
        assert_close_three_way(torch.empty(0), torch.empty(0), torch.empty(0), 0.01, "empty")


def test_nan_fails_whatever_the_floor() -> None:
    target, expected, baseline = noisy(1000, 7)
    target[0] = math.nan
    with pytest.raises(AssertionError, match="finite"):
        assert_close_three_way(target=target, expected=expected, baseline=baseline, rtol=100.0, name="x")


def test_bfloat16_tensors_are_taken_as_they_are() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(64, 96, generator=generator), torch.randn(96, 96, generator=generator)
    expected, baseline = x.bfloat16().float() @ w.bfloat16().float(), x.bfloat16() @ w.bfloat16()
    order = torch.randperm(96, generator=generator)
    target = x.bfloat16()[:, order] @ w.bfloat16()[order]
    assert_close_three_way(target=target, expected=expected, baseline=baseline, rtol=1e-4, name="matmul")
    with pytest.raises(AssertionError):
        assert_close_three_way(
            target=(target.float() * 1.01).bfloat16(), expected=expected, baseline=baseline, rtol=1e-4, name="matmul"
        )


def test_assert_close() -> None:
    expected = torch.tensor([1.0, -4.0, 2.0])
    assert assert_close(expected + 0.03, expected, rtol=0.01).status.value == "pass"
    with pytest.raises(AssertionError, match="scaled_linf"):
        assert_close(expected + 0.05, expected, rtol=0.01)
    for bad in (math.nan, math.inf):
        with pytest.raises(AssertionError):
            assert_close(torch.tensor([1.0, -4.0, bad]), expected, rtol=100.0)
    with pytest.raises(AssertionError, match="shape"):
        assert_close(expected[:2], expected)
    with pytest.raises(NotMeasured):
        assert_close(torch.empty(0), torch.empty(0))
    assert_close(torch.zeros(3), torch.zeros(3))
    with pytest.raises(AssertionError):
        assert_close(torch.full((3,), 1e-3), torch.zeros(3))
