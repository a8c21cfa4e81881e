"""Error statistics: known values, clusters, and nothing hidden by NaN."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pilotage.accuracy import metrics
from pilotage.accuracy.logit_errors import logit_errors, ulp

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("probability", "dof", "expected"),
    [(0.975, 1, 12.7062), (0.975, 7, 2.36462), (0.999, 7, 4.78529), (0.999, 8, 4.50079), (0.975, 1000, 1.96234)],
)
def test_student_t_quantile_agrees_with_tables(probability: float, dof: int, expected: float) -> None:
    assert metrics.student_t_quantile(probability, dof) == pytest.approx(expected, rel=2e-5)
    assert metrics.student_t_quantile(1 - probability, dof) == pytest.approx(-expected, rel=2e-5)


def test_errors_of_values_that_are_not_finite() -> None:
    expected = torch.tensor([1.0, INF, -INF, INF, 1.0, 1.0, NAN])
    actual = torch.tensor([1.5, INF, -INF, -INF, NAN, INF, 1.0])
    assert metrics.errors(actual, expected).tolist() == [0.5, 0.0, 0.0, INF, INF, INF, INF]


def test_rms_ratio_of_exact_arms() -> None:
    zero, one = torch.zeros(5), torch.ones(5)
    assert metrics.rms_ratio(one, zero).low == INF
    assert math.isnan(metrics.rms_ratio(zero, zero).estimate)
    assert metrics.rms_ratio(zero, one).high == 0.0
    assert metrics.rms_ratio(4 * one, one).estimate == 2.0
    assert metrics.rms_ratio(one[:1], one[:1]).high == INF  # one cluster says nothing about its spread


def test_rms_ratio_with_a_nan_is_infinite() -> None:
    bad = torch.tensor([1.0, NAN, 1.0])
    assert metrics.rms_ratio(bad, torch.ones(3)).estimate == INF


def test_interval_covers_the_true_ratio() -> None:
    """Nominally 95%; with 64 clusters of very unequal size the linearised interval may lose a few points."""
    covered = 0
    for seed in range(400):
        generator = torch.Generator().manual_seed(seed)
        size = torch.exp(torch.randn(64, generator=generator))
        a, b = (size * torch.randn(32, 64, generator=generator).square().sum(0) for _ in range(2))
        ratio = metrics.rms_ratio(1.44 * a, b)
        covered += ratio.low <= 1.2 <= ratio.high
    assert 0.91 <= covered / 400 <= 0.98


def test_clusters_widen_the_interval() -> None:
    """Elements of a row that err together are one observation, not many."""
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(32, 256, generator=generator)
    common = [torch.randn(32, 1, generator=generator).exp() for _ in range(2)]
    target, baseline = (expected + 0.01 * scale * torch.randn(32, 256, generator=generator) for scale in common)
    measured = metrics.tensor_errors(target, expected, baseline)
    flat = metrics.tensor_errors(target.reshape(-1), expected.reshape(-1), baseline.reshape(-1))
    assert measured.rms.estimate == pytest.approx(flat.rms.estimate)
    assert measured.rms.se > 3 * flat.rms.se


def test_ulp() -> None:
    values = torch.tensor([1.0, 1.99, 2.0, 0.75, -130.0])
    spacing = ulp(values, torch.bfloat16)
    assert spacing.tolist() == [2**-7, 2**-7, 2**-6, 2**-8, 1.0]


@given(st.floats(1e-30, 1e30))
def test_ulp_is_the_distance_to_the_next_float(value: float) -> None:
    x = torch.tensor(value, dtype=torch.float32)
    next_one = torch.nextafter(x, torch.tensor(INF))
    assert float(ulp(x, torch.float32)) == float(next_one.double() - x.double())


@pytest.mark.parametrize("at_once", [1, 5, 1000])
def test_row_errors(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "AT_ONCE", at_once)
    expected = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 0.0]])
    actual = torch.tensor([[3.3, 4.4], [1.0, 0.5], [0.0, NAN]])
    rows = metrics.row_errors(actual, expected)
    assert rows.sq[:2].tolist() == pytest.approx([0.25, 0.25], rel=1e-6)
    assert rows.gain[:2].tolist() == pytest.approx([0.1, 0.0], rel=1e-6)
    assert rows.linf[2] == INF and rows.sq[2] == INF and rows.gain[2] == INF


@pytest.mark.parametrize("at_once", [1, 1000])
def test_logit_errors(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "AT_ONCE", at_once)
    expected = torch.tensor([[4.0, 2.0, 1.0, 0.0], [1.0, 2.0, 0.0, -4.0]])
    actual = torch.tensor([[4.0, 2.0, 1.5, 0.0], [2.0, 1.0, 0.0, -4.0]])
    found = logit_errors(actual, expected, dtype=torch.bfloat16, ks=(1, 2, 1000))
    assert found.top1.tolist() == [True, False]
    assert found.ulps.tolist() == [0.0, 1.0 / 2**-5]  # the ulp at max|actual| = 4
    assert {k: v.tolist() for k, v in found.topk.items()} == {
        "1": [0.0, 0.25],
        "2": [0.0, 0.25],
        "1000": [0.125, 0.25],
        "all": [0.125, 0.25],
    }
    p, q = expected[1].softmax(-1), actual[1].softmax(-1)
    assert float(found.kl[1]) == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)
    assert found.gap.tolist() == [2.0, 1.0]


def test_logit_errors_never_hide_a_nan() -> None:
    expected = torch.randn(3, 8)
    actual = expected.clone()
    actual[1, 3] = NAN
    found = logit_errors(actual, expected, dtype=torch.float32, ks=(5,))
    for values in (found.kl, found.ulps, found.topk["all"]):
        assert values[1] == INF and torch.isfinite(values[[0, 2]]).all()


def test_model_errors_single_wrong_row_shows_in_the_worst_row_only() -> None:
    generator = torch.Generator().manual_seed(1)
    expected = torch.randn(400, 512, generator=generator)
    target, baseline = (expected + 1e-2 * torch.randn(400, 512, generator=generator) for _ in range(2))
    target[123] += 0.15 * torch.randn(512, generator=generator)
    rows = [metrics.row_errors(x, expected) for x in (target, baseline)]
    found = metrics.model_errors(*rows, ["prefill"] * 300 + ["decode"] * 100)
    assert found.rms["all"].low < 1.0  # the clustered interval cannot tell
    assert found.worst_index == 123 and found.worst_row > 10
    assert set(found.rms) == {"all", "prefill", "decode"}
    assert found.rms["decode"].n == 100 and found.rms["decode"].estimate == pytest.approx(1.0, abs=0.02)


def test_model_errors_have_a_floor_where_the_baseline_is_exact() -> None:
    expected = torch.randn(50, 64)
    rows = metrics.row_errors(expected.double() * (1 + 2**-24), expected)
    exact = metrics.row_errors(expected, expected)
    found = metrics.model_errors(rows, exact, ["decode"] * 50)
    assert found.rms["all"].estimate == pytest.approx(0.125, rel=1e-3)
    assert found.gain == pytest.approx(1.0, rel=1e-3)
