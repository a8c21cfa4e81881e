"""The only place that says pass or fail. Pure functions from statistics to verdicts.

Three outcomes: a claim passes when the whole interval of its statistic is on the good side of the bound, fails when the
whole interval is on the bad side, and is not measured when the bound lies inside it or there is nothing to measure.
Rules are joined by AND: no rule that passes can excuse one that fails.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pilotage.accuracy import metrics
from pilotage.core.nouns import Status, Verdict

# A tensor against a baseline without controls of its own. 1.2: the largest ratio of pooled errors between clean
# implementations of one module, measured on six layers of 39 sites, was 1.25 with a propagated input and 1.1 with
# the reference's input; 1.3 must fail.
TENSOR_RATIO_BOUND = 1.2
# How far two independent draws of one error law may lie apart, in standard errors of the log ratio, half of them for
# the draw itself and half for the interval that must fit under the bound. `pilotage.accuracy.simulate` measures the
# false alarms that follow.
NULL_ALLOWANCE = 4.5
MIN_ELEMENTS = 8
# In units of an element's own scale. A million Gaussian errors reach 5.
ELEMENT_BOUND = 12.0
ELEMENT_TAIL = 3.0
ROW_BOUND = 3.0

MIN_CONTROLS = 8
CONTROL_CONFIDENCE = 0.999
# Controls share much of their arithmetic with the baseline and can agree by luck; a spread below this is not believed.
# The extreme of many rows varies more than their pool.
MIN_CONTROL_SPREAD = 0.06
MIN_EXTREME_SPREAD = 0.15
MAX_BELOW_MEDIAN = 1.5
# A control further off than this is no clean computation of the model, whatever it was meant to be.
MAX_CONTROL_RATIO = 4.0
# The floors are where nothing is wrong, so a bound under 1 floor says nothing; the row gain reached 0.92 of its own.
MIN_MODEL_BOUND = 1.0
MIN_GAIN_BOUND = 1.5
# Where nothing is summed in a half precision, all that is correct rounds as often as the baseline or less. Rounding
# twice in place of once makes the pooled error 1.41 times as large, three times in place of twice 1.22 times. To the
# bound comes what two draws of one error law differ by: so many over the root of the number of elements.
ALIKE_RATIO = 1.15
ALIKE_DRAWS = 3.0
# Share of elements that may differ where none has a reason to.
MAX_UNLIKE = 1e-3
# For single fp32 tensors, without controls of their own.
BASELINE_SLACK = 3.0
GAIN_BOUND = 3.0


def by_interval(low: float, high: float, bound: float) -> Status:
    """Say on which side of `bound` an interval lies; any NaN is not measured."""
    if low > bound:
        return Status.FAIL
    if high <= bound:
        return Status.PASS
    return Status.NOT_MEASURED


def by_value(value: float, bound: float) -> Status:
    """Compare a statistic that has no interval; NaN fails."""
    return Status.PASS if value <= bound else Status.FAIL


def null_allowance(ratio: metrics.Ratio, elements: int) -> float:
    """Return the factor by which two draws of the baseline's error law may differ.

    Args:
        ratio: its clusters and the standard error under that hypothesis.
        elements: elements in all clusters; Gaussian errors vary at least as much as that many of them do.
    """
    if ratio.n == 0:
        return math.inf
    # Student's t over the normal quantile: few clusters estimate their own spread badly.
    few = metrics.student_t_quantile(0.975, max(ratio.n - 1, 1)) / 1.96
    return math.exp(min(NULL_ALLOWANCE * max(ratio.null_se, math.sqrt(1 / elements)) * few, 100.0))


def _ratio_verdict(claim: str, metric: str, ratio: metrics.Ratio, elements: int, evidence: dict[str, Any]) -> Verdict:
    bound = TENSOR_RATIO_BOUND * null_allowance(ratio, elements)
    if math.isinf(ratio.estimate):
        status = Status.FAIL
    elif math.isnan(ratio.estimate):
        status = Status.PASS  # neither arm has any error in these elements
    else:
        status = by_interval(ratio.low, ratio.high, bound)
    measured = math.isfinite(ratio.estimate)
    return Verdict(
        claim=claim,
        metric=metric,
        estimate=ratio.estimate if measured else None,
        interval=(ratio.low, ratio.high) if measured else None,
        bound=bound,
        bound_source=(
            f"{TENSOR_RATIO_BOUND} times what two draws of the baseline's error law may differ by with n={ratio.n}"
        ),
        n=ratio.n,
        status=status,
        evidence=evidence,
    )


def single(
    status: Status, claim: str, metric: str, why: str, *, n: int = 0, estimate: float | None = None, **more: Any
) -> Verdict:
    """Make a verdict that a property decided rather than a statistic; `why` says which property."""
    return Verdict(
        claim=claim, metric=metric, estimate=estimate, bound=None, bound_source=why, n=n, status=status, evidence=more
    )


def three_way(target: Tensor, expected: Tensor, baseline: Tensor, *, rtol: float, name: str) -> list[Verdict]:
    """Judge a target tensor by the error that a trusted baseline makes against the same expected tensor.

    Args:
        target: what is tested, any float dtype.
        expected: the reference, same shape, at a higher precision.
        baseline: a trusted implementation at the target's precision, same shape.
        rtol: relative L2 error under which nothing fails (for where the baseline is exact).
        name: what is compared, for the claims.

    Returns:
        One verdict for each rule. If any fails the tensor fails; else if any is not measured, it is not measured.
    """
    claim = f"{name}: error no larger than the baseline's"
    if not target.shape == expected.shape == baseline.shape:
        shapes = f"target {tuple(target.shape)}, expected {tuple(expected.shape)}, baseline {tuple(baseline.shape)}"
        return [single(Status.FAIL, f"{name}: shapes agree", "shape", shapes)]
    if expected.numel() == 0:
        return [single(Status.NOT_MEASURED, claim, "numel", "no elements to compare")]
    if bool(expected.isnan().any()):
        return [single(Status.NOT_MEASURED, claim, "finite", "the expected tensor contains NaN")]
    wrong = int((~metrics.errors(target, expected).isfinite()).sum())
    if wrong:
        why = "values that are not finite where expected is, or infinite with another sign"
        return [single(Status.FAIL, f"{name}: finite", "non_finite", why, n=expected.numel(), estimate=float(wrong))]
    if not bool(metrics.errors(baseline, expected).isfinite().all()):
        return [single(Status.NOT_MEASURED, claim, "finite", "the baseline is not finite where expected is")]

    measured = metrics.tensor_errors(target, expected, baseline)
    floor = Verdict(
        claim=f"{name}: relative L2 error within rtol",
        metric="relative_l2",
        estimate=measured.relative_l2,
        bound=rtol,
        bound_source="rtol, the floor under which nothing fails",
        n=measured.n,
        status=Status.PASS,
        evidence={"baseline": measured.baseline_relative_l2},
    )
    if measured.relative_l2 <= rtol:
        return [floor]
    evidence = {"relative_l2": measured.relative_l2, "baseline_relative_l2": measured.baseline_relative_l2}
    if measured.n < MIN_ELEMENTS:
        why = f"{measured.n} elements over rtol; the ratio of two errors needs at least {MIN_ELEMENTS}"
        return [single(Status.NOT_MEASURED, claim, "rms_ratio", why, n=measured.n, **evidence)]

    verdicts = [
        _ratio_verdict(claim, "rms_ratio", measured.rms, measured.n, evidence),
        _ratio_verdict(f"{claim} without the largest 1%", "trimmed_rms_ratio", measured.trimmed, measured.n, {}),
    ]
    bound = max(ELEMENT_BOUND, ELEMENT_TAIL * measured.baseline_element)
    verdicts.append(
        Verdict(
            claim=f"{name}: no single element far off",
            metric="worst_element",
            estimate=measured.worst_element,
            bound=bound,
            bound_source=(
                f"{ELEMENT_BOUND:g} scales of the element, or {ELEMENT_TAIL:g} times the baseline's third largest"
            ),
            n=measured.n,
            status=by_value(measured.worst_element, bound),
        )
    )
    if measured.worst_row is not None:
        bound = ROW_BOUND * (1 + math.sqrt(2 * math.log(measured.rows) / measured.row_width))
        verdicts.append(
            Verdict(
                claim=f"{name}: no single row far off",
                metric="worst_row",
                estimate=measured.worst_row,
                bound=bound,
                bound_source=f"{ROW_BOUND:g} times the largest of {measured.rows} clean rows of {measured.row_width}",
                n=measured.rows,
                status=by_value(measured.worst_row, bound),
            )
        )
    return verdicts


def floored(target: Tensor, expected: Tensor, baseline: Tensor, *, name: str) -> list[Verdict]:
    """Judge an fp32 tensor [..., width] against an fp32 reference, where the baseline is often bitwise equal to it.

    The unit of each statistic is its floor, or what the baseline does if that is more.

    Args:
        target: what is tested.
        expected: Hugging Face in fp32.
        baseline: the same under its other attention implementation.
        name: what is compared, for the claims.
    """
    claim = f"{name}: equal to the reference up to fp32 rounding"
    if not target.shape == expected.shape == baseline.shape:
        shapes = f"target {tuple(target.shape)}, expected {tuple(expected.shape)}, baseline {tuple(baseline.shape)}"
        return [single(Status.FAIL, f"{name}: shapes agree", "shape", shapes)]
    if expected.numel() == 0 or not bool(expected.isfinite().all() and baseline.isfinite().all()):
        return [single(Status.NOT_MEASURED, claim, "finite", "nothing to compare, or a reference that is not finite")]
    width = expected.shape[-1]
    rows = expected.reshape(-1, width)
    a, b = (metrics.row_errors(x.reshape(-1, width), rows) for x in (target, baseline))
    of_target, of_baseline = (metrics.channel_linf(x.reshape(-1, width), rows) for x in (target, baseline))
    return [
        Verdict(
            claim=f"{claim} ({what})",
            metric=metric,
            estimate=value if math.isfinite(value) else None,
            bound=bound,
            bound_source=f"unit: floor {floor}, or {BASELINE_SLACK:g} times the other attention's difference",
            n=a.n,
            status=by_value(value, bound),
        )
        for (metric, value), what, bound, floor in zip(
            metrics.in_floors(a, b, linf=(of_target, of_baseline), slack=BASELINE_SLACK).items(),
            ("pooled", "largest element", "rescaling of rows"),
            (1.0, 1.0, GAIN_BOUND),
            ("4 eps RMS(expected)", "80 eps RMS(expected), of the channel where that is larger", "eps / 2"),
            strict=True,
        )
    ]


def alike_bound(elements: int) -> float:
    """Bound the ratio of two pooled errors over so many elements, where both round as often."""
    return ALIKE_RATIO + ALIKE_DRAWS / math.sqrt(elements)


def rounds_alike(target: Tensor, exact: Tensor, baseline: Tensor, *, name: str) -> Verdict:
    """Judge what is computed in fp32 and then rounded, by how much is lost to rounding.

    Args:
        target: what is tested, in a half precision.
        exact: fp32 arithmetic on the same rounded weights and inputs, same shape.
        baseline: a trusted implementation in the target's dtype, same shape.
        name: what is compared, for the claim.
    """
    lost, others = (metrics.errors(x, exact).square().sum().item() for x in (target, baseline))
    ratio = math.sqrt(lost / others) if others else (0.0 if lost == 0 else math.inf)
    bound = alike_bound(max(target.numel(), 1))
    return Verdict(
        claim=f"{name}: rounded no more often than the baseline",
        metric="rounding_ratio",
        estimate=ratio if math.isfinite(ratio) else None,
        bound=bound,
        bound_source=f"{ALIKE_RATIO}, and what two draws of one error law differ by",
        n=target.numel(),
        status=by_value(ratio, bound),
    )


def same_bits(target: Tensor, baseline: Tensor, *, name: str) -> Verdict:
    """Judge a look-up in a half precision: a product of two such numbers is exact in fp32 and has one way to round.

    Args:
        target: what is tested.
        baseline: a trusted implementation in the same dtype, same shape.
        name: what is compared, for the claim.
    """
    unlike = float((target != baseline).double().mean())
    return Verdict(
        claim=f"{name}: a look-up, equal to the baseline's to the bit",
        metric="unlike",
        estimate=unlike,
        bound=MAX_UNLIKE,
        bound_source="rows of a table times a constant have one way to round",
        n=target.numel(),
        status=by_value(unlike, MAX_UNLIKE),
    )


def two_way(actual: Tensor, expected: Tensor, *, rtol: float, atol: float, name: str) -> Verdict:
    """Judge (max|actual - expected| - atol) / max|expected| against `rtol`; anything not finite and unequal fails."""
    claim = f"{name}: close to expected"
    if actual.shape != expected.shape:
        shapes = f"actual {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        return single(Status.FAIL, f"{name}: shapes agree", "shape", shapes)
    if expected.numel() == 0:
        return single(Status.NOT_MEASURED, claim, "numel", "no elements to compare")
    finite = expected[expected.isfinite()].double().abs()
    largest = float(finite.amax()) if finite.numel() else 0.0
    excess = max(0.0, float(metrics.errors(actual, expected).abs().amax()) - atol)
    value = excess / largest if largest else (0.0 if excess == 0 else math.inf)
    return Verdict(
        claim=claim,
        metric="scaled_linf",
        estimate=value,
        bound=rtol,
        bound_source=f"rtol={rtol:g}, after atol={atol:g}",
        n=expected.numel(),
        status=by_value(value, rtol),
    )


def control_bound(values: Sequence[float], *, spread: float = MIN_CONTROL_SPREAD) -> float:
    """Return the value that one more clean control would stay under with 99.9% probability.

    A one-sided prediction limit of the logarithms, Student's t with n - 1 degrees of freedom. Values far below the
    median are raised towards it: a control that shares nearly all arithmetic with the reference must not widen the
    limit at its other end.

    Args:
        values: a statistic of each control.
        spread: smallest standard deviation of the logarithms that is believed.

    Raises:
        ValueError: fewer than `MIN_CONTROLS` values, one that is negative or not finite, or a median of 0.
    """
    median = statistics.median(values) if values else 0.0
    if len(values) < MIN_CONTROLS or not all(0 <= value < math.inf for value in values) or median == 0:
        raise ValueError(f"needs at least {MIN_CONTROLS} finite values, not mostly 0, got {list(values)}")
    logs = [math.log(max(value, median / MAX_BELOW_MEDIAN)) for value in values]
    mean = math.fsum(logs) / len(logs)
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in logs) / (len(logs) - 1))
    quantile = metrics.student_t_quantile(CONTROL_CONFIDENCE, len(logs) - 1)
    return math.exp(mean + quantile * max(deviation, spread) * math.sqrt(1 + 1 / len(logs)))


@dataclass(frozen=True, kw_only=True)
class ControlErrors:
    """What the gates need to know of a clean control; JSON-serialisable as it is.

    Attributes:
        name: how the control differs from the baseline.
        high: upper end of the interval of each RMS ratio, by phase.
        estimate: the RMS ratio over all rows.
        worst_row, linf, gain: see `metrics.ModelErrors`.
    """

    name: str
    estimate: float
    high: dict[str, float]
    worst_row: float
    linf: float
    gain: float

    @classmethod
    def of(cls, name: str, measured: metrics.ModelErrors) -> ControlErrors:
        return cls(
            name=name,
            estimate=measured.rms["all"].estimate,
            high={phase: ratio.high for phase, ratio in measured.rms.items()},
            worst_row=measured.worst_row,
            linf=measured.linf,
            gain=measured.gain,
        )


def clean(controls: Sequence[ControlErrors]) -> list[ControlErrors]:
    """Keep the controls that can be believed: measured in full, and within `MAX_CONTROL_RATIO` of the baseline."""
    return [
        control
        for control in controls
        if control.estimate <= MAX_CONTROL_RATIO
        and all(
            0 < value < math.inf for value in (*control.high.values(), control.worst_row, control.linf, control.gain)
        )
    ]


def whole_model(target: metrics.ModelErrors, controls: Sequence[ControlErrors], *, arm: str, n: int) -> list[Verdict]:
    """Judge the logits of a model by clean controls of the same model on the same tokens.

    Args:
        target: errors of the target in units of the baseline's.
        controls: errors of the controls in the same units.
        arm: name of the arm, for the claims.
        n: rows compared.

    Returns:
        The pooled RMS ratio over all rows and over those of each phase, the worst row, the largest error and, in the
        fp32 arm, the row gain. Each can fail alone.
    """
    used = clean(controls)
    measures: list[tuple[str, str, float, tuple[float, float] | None, dict[str, float], float, int]] = []
    for phase, ratio in target.rms.items():
        metric = "rms_ratio" if phase == "all" else f"rms_ratio_{phase}"
        claim = f"{arm}: logit error over {phase} rows is that of a clean implementation"
        highs = {control.name: control.high[phase] for control in used if phase in control.high}
        measures.append((claim, metric, ratio.estimate, (ratio.low, ratio.high), highs, MIN_MODEL_BOUND, ratio.n))
    extremes = [
        ("no single token is far off", "worst_row", target.worst_row, "worst_row", MIN_MODEL_BOUND),
        ("no single logit is far off", "linf_ratio", target.linf, "linf", MIN_MODEL_BOUND),
    ]
    if arm == "float32":
        # In a half precision rounding moves the gain more than any wrong epsilon does.
        extremes.append(("logits are not rescaled", "gain_ratio", target.gain, "gain", MIN_GAIN_BOUND))
    for text, metric, value, attribute, least in extremes:
        found = {control.name: float(getattr(control, attribute)) for control in used}
        measures.append((f"{arm}: {text}", metric, value, None, found, least, n))

    verdicts = []
    dropped = sorted({control.name for control in controls} - {control.name for control in used})
    for claim, metric, value, interval, found, least, rows in measures:
        values = list(found.values())
        evidence: dict[str, Any] = {"controls": found}
        if dropped:
            evidence["controls_dropped"] = dropped
        if metric == "worst_row":
            evidence["row"] = target.worst_index
        bound: float | None = None
        if not math.isfinite(value):
            status, source = Status.FAIL, "not finite where the reference is"
        elif len(values) < MIN_CONTROLS or statistics.median(values) == 0:
            status, source = Status.NOT_MEASURED, f"{len(values)} clean controls; a bound needs {MIN_CONTROLS}"
        else:
            spread = MIN_CONTROL_SPREAD if interval else MIN_EXTREME_SPREAD
            bound = max(least, control_bound(values, spread=spread))
            of = "the upper ends of " if interval else ""
            source = f"99.9% prediction limit from {of}{len(values)} clean controls of this model"
            status = by_interval(*interval, bound) if interval else by_value(value, bound)
        verdicts.append(
            Verdict(
                claim=claim,
                metric=metric,
                estimate=value if math.isfinite(value) else None,
                interval=interval if interval and all(map(math.isfinite, interval)) else None,
                bound=bound,
                bound_source=source,
                n=rows,
                status=status,
                evidence=evidence,
            )
        )
    return verdicts
