"""Verdicts: three outcomes, every rule can fail alone, bounds come from controls."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from pilotage.accuracy import gates, metrics
from pilotage.core.nouns import Status, worst

NAN = math.nan


def control(value: float, name: str = "c", **changes: object) -> gates.ControlErrors:
    one = gates.ControlErrors(
        name=name, estimate=value, high={"all": value, "decode": value}, worst_row=value, linf=value, gain=value
    )
    return dataclasses.replace(one, **changes)


def measured(value: float, *, half: float = 0.02, **changes: object) -> metrics.ModelErrors:
    ratio = metrics.Ratio(estimate=value, low=value - half, high=value + half, n=100, se=half / 2, null_se=half / 2)
    found = metrics.ModelErrors(
        rms={"all": ratio, "decode": ratio}, worst_row=value, worst_index=7, linf=value, gain=value, relative_l2=0.01
    )
    return dataclasses.replace(found, **changes)


CLEAN = [control(value, f"c{value}") for value in (0.9, 0.95, 0.99, 1.0, 1.02, 1.05, 1.08, 1.1)]


def statuses(target: metrics.ModelErrors, controls: list[gates.ControlErrors], arm: str = "bfloat16") -> dict[str, str]:
    return {v.metric: v.status.value for v in gates.whole_model(target, controls, arm=arm, n=100)}


def test_by_interval() -> None:
    assert gates.by_interval(1.0, 1.1, 1.2) is Status.PASS
    assert gates.by_interval(1.3, 1.4, 1.2) is Status.FAIL
    assert gates.by_interval(1.1, 1.3, 1.2) is Status.NOT_MEASURED
    assert gates.by_interval(NAN, NAN, 1.2) is Status.NOT_MEASURED
    assert gates.by_value(NAN, 1.0) is Status.FAIL


def test_whole_model_passes_what_controls_do() -> None:
    assert set(statuses(measured(1.05), CLEAN).values()) == {"pass"}


def test_whole_model_states_bound_source_and_n() -> None:
    for verdict in gates.whole_model(measured(1.05), CLEAN, arm="float32", n=100):
        assert verdict.bound is not None and 1.1 < verdict.bound < 2.5
        assert "8 clean controls of this model" in verdict.bound_source
        assert verdict.n == 100
        assert len(verdict.evidence["controls"]) == 8


@pytest.mark.parametrize("metric", ["worst_row", "linf", "gain"])
def test_each_statistic_fails_alone(metric: str) -> None:
    found = statuses(measured(1.0, **{metric: 30.0}), CLEAN, arm="float32")
    assert [name for name, status in found.items() if status == "fail"] == [
        {"worst_row": "worst_row", "linf": "linf_ratio", "gain": "gain_ratio"}[metric]
    ]


def test_a_phase_fails_alone() -> None:
    good, bad = measured(1.0).rms["all"], measured(3.0).rms["all"]
    found = statuses(measured(1.0, rms={"all": good, "decode": bad}), CLEAN)
    assert found["rms_ratio_decode"] == "fail" and found["rms_ratio"] == "pass"


def test_an_interval_across_the_bound_is_not_measured() -> None:
    assert statuses(measured(1.2, half=1.0), CLEAN)["rms_ratio"] == "not_measured"


def test_too_few_controls_measure_nothing_but_nan_still_fails() -> None:
    assert set(statuses(measured(1.0), CLEAN[:7]).values()) == {"not_measured"}
    assert statuses(measured(1.0, worst_row=math.inf), CLEAN[:7])["worst_row"] == "fail"


def test_a_broken_control_does_not_widen_the_bound() -> None:
    broken = [*CLEAN, control(200.0, "broken"), control(1.0, "nan", worst_row=NAN)]
    first, second = (gates.whole_model(measured(1.0), c, arm="bfloat16", n=9)[0] for c in (CLEAN, broken))
    assert first.bound == second.bound
    assert second.evidence["controls_dropped"] == ["broken", "nan"]


def test_a_control_that_hardly_differs_does_not_widen_the_bound() -> None:
    values = [1.0, 1.02, 0.98, 1.01, 0.99, 1.0, 1.03]
    assert gates.control_bound([*values, 1e-6]) < 1.1 * gates.control_bound([*values, 0.7])


def test_control_bound_is_a_prediction_limit() -> None:
    """One more control from the same law exceeds it about once in a thousand times."""
    generator = torch.Generator().manual_seed(0)
    logs = 0.3 * torch.randn(20000, 9, generator=generator, dtype=torch.float64)
    beyond = sum(math.exp(row[8]) > gates.control_bound([math.exp(x) for x in row[:8]]) for row in logs.tolist())
    # Raising low values towards the median, as is done, can only lower the limit: a little over nominal is expected.
    assert beyond / 20000 < 0.006


def test_control_bound_refuses_too_few() -> None:
    with pytest.raises(ValueError, match="at least 8"):
        gates.control_bound([1.0] * 7)
    with pytest.raises(ValueError, match="at least 8"):
        gates.control_bound([1.0] * 7 + [NAN])


def three_way(target: torch.Tensor, expected: torch.Tensor, baseline: torch.Tensor, rtol: float = 0.0) -> Status:
    return worst([v.status for v in gates.three_way(target, expected, baseline, rtol=rtol, name="x")])


def test_a_look_up_has_one_way_to_round() -> None:
    """Gemma's scale, sqrt(640), is 25.25 in bf16: who multiplies by 25.298 is nearer to fp32 and is not the model."""
    table = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    home = table * torch.tensor(640**0.5, dtype=torch.bfloat16)
    unrounded = (table.float() * 640**0.5).bfloat16()
    assert three_way(unrounded, table.float() * 640**0.5, home) is Status.PASS
    assert gates.same_bits(unrounded, home, name="x").status is Status.FAIL
    assert gates.same_bits(home.clone(), home, name="x").status is Status.PASS


def test_rounding_once_more_is_told_from_rounding_elsewhere() -> None:
    """A norm that rounds before its weight, where the model's rounds after it."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(80, 60, generator=generator), 1 + 0.3 * torch.randn(60, generator=generator)
    weight = weight.bfloat16().float()
    exact = weight * x
    once, twice = exact.bfloat16(), (weight * x.bfloat16().float()).bfloat16()
    assert gates.rounds_alike(once, exact, once, name="x").status is Status.PASS
    assert gates.rounds_alike(once, exact, twice, name="x").status is Status.PASS  # less is no fault
    found = gates.rounds_alike(twice, exact, once, name="x")
    assert found.status is Status.FAIL and 1.2 < (found.estimate or 0) < 1.6
    assert gates.rounds_alike(exact, exact, exact, name="x").status is Status.PASS


def test_three_way_edges() -> None:
    expected = torch.randn(40, 40)
    noisy = expected + 0.01 * torch.randn(40, 40)
    assert three_way(expected[:0], expected[:0], expected[:0]) is Status.NOT_MEASURED
    assert three_way(noisy[:20], expected, noisy) is Status.FAIL  # shapes
    assert three_way(expected, expected, expected) is Status.PASS
    assert three_way(noisy, expected, expected) is Status.FAIL  # an exact baseline and no floor
    assert three_way(noisy, expected, expected, rtol=0.02) is Status.PASS
    assert three_way(noisy, expected * NAN, noisy) is Status.NOT_MEASURED
    bad = noisy.clone()
    bad[3, 3] = NAN
    assert three_way(bad, expected, noisy, rtol=10.0) is Status.FAIL
    assert three_way(noisy, expected, bad) is Status.NOT_MEASURED
    masked, masked_noisy = expected.clone(), noisy.clone()
    masked[0, 0] = masked_noisy[0, 0] = -math.inf
    assert three_way(masked_noisy, masked, masked_noisy.clone()) is Status.PASS


def test_floored_accepts_rounding_and_rejects_more() -> None:
    expected = torch.randn(64, 128)
    exact = gates.floored(expected, expected, expected, name="x")
    assert worst([v.status for v in exact]) is Status.PASS
    one_ulp = torch.nextafter(expected, torch.full_like(expected, math.inf))
    assert worst([v.status for v in gates.floored(one_ulp, expected, expected, name="x")]) is Status.PASS
    scaled = expected * (1 + 2e-6)
    failing = [v.metric for v in gates.floored(scaled, expected, expected, name="x") if v.status is Status.FAIL]
    assert "gain_in_floors" in failing
    single = expected.clone()
    single[5, 5] += 1e-3
    failing = [v.metric for v in gates.floored(single, expected, expected, name="x") if v.status is Status.FAIL]
    assert "linf_in_floors" in failing
    assert gates.floored(expected * NAN, expected, expected, name="x")[0].status is Status.FAIL
    assert gates.floored(expected, expected * NAN, expected, name="x")[0].status is Status.NOT_MEASURED


def test_floored_knows_outlier_channels() -> None:
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(64, 640, generator=generator)
    expected[:, 7] *= 30
    rms = float(expected.square().mean().sqrt())

    def linf(row: int, channel: int, error: float) -> Status:
        target = expected.clone()
        target[row, channel] += error
        verdicts = gates.floored(target, expected, expected, name="x")
        return next(verdict.status for verdict in verdicts if verdict.metric == "linf_in_floors")

    unit = 80 * metrics.FLOAT32_EPS * rms
    assert linf(3, 7, 5 * unit) is Status.PASS  # a channel of 18 times the tensor's RMS rounds that much more
    assert linf(3, 8, 1.5 * unit) is Status.FAIL
    assert linf(3, 7, 50 * unit) is Status.FAIL
