"""Statistics of errors: pure functions from tensors to numbers. What counts as good enough is decided in `gates`.

Everything is computed in float64 and nothing passes by being NaN: a value that is not finite where the reference is
finite has infinite error, and maxima are taken with `torch.amax`, which keeps NaN, never with Python's `max`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """RMS(target error) / RMS(baseline error), with an interval from independent clusters.

    Attributes:
        estimate: the ratio; inf where the baseline is exact and the target is not, NaN where both are exact.
        low: lower end of the interval.
        high: upper end of the interval.
        n: clusters that the interval is made of.
        se: standard error of the ratio's logarithm.
        null_se: the same under the hypothesis that the target's errors follow the baseline's law independently.
    """

    estimate: float
    low: float
    high: float
    n: int
    se: float
    null_se: float


@functools.lru_cache(maxsize=256)
def student_t_quantile(probability: float, dof: int) -> float:
    """Return the quantile of Student's t with `dof` degrees of freedom, to about 1e-6, by bisection on its CDF."""
    if dof < 1:
        return math.inf
    log_norm = math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2) - 0.5 * math.log(dof * math.pi)

    def upper_tail(x: float) -> float:
        # With x = sqrt(dof) tan(angle) the density becomes a power of the cosine on a finite range.
        start, steps = math.atan(x / math.sqrt(dof)), 400
        width = (math.pi / 2 - start) / steps
        total = 0.0
        for i in range(steps + 1):
            weight = 1 if i in (0, steps) else 4 if i % 2 else 2
            total += weight * max(math.cos(start + i * width), 0.0) ** (dof - 1)
        return math.exp(log_norm) * math.sqrt(dof) * total * width / 3

    tail = 1 - probability
    if tail > 0.5:
        return -student_t_quantile(1 - probability, dof)
    low, high = 0.0, 1.0
    while upper_tail(high) > tail:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if upper_tail(middle) > tail else (low, middle)
    return (low + high) / 2


def errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Return `actual - expected` in float64, both of one shape.

    Equal infinities have error 0. Whatever else is not finite has error inf: a NaN can never look small.
    """
    actual, expected = actual.detach().double(), expected.detach().double()
    error = actual - expected
    error = torch.where(actual == expected, torch.zeros_like(error), error)
    return torch.where(torch.isfinite(error), error, torch.full_like(error, math.inf))


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """Return |actual - expected| / |expected| in the Euclidean norm, over finite values of `expected`."""
    finite = torch.isfinite(expected)
    norm = float(torch.where(finite, expected, 0).double().norm())
    error = float(errors(actual, expected).norm())
    if error == 0:
        return 0.0
    return error / norm if norm else math.inf


def rms_ratio(target_sq: Tensor, baseline_sq: Tensor, *, confidence: float = CONFIDENCE) -> Ratio:
    """Compare two sets of squared errors, both measured on the same `n` independent clusters.

    Args:
        target_sq: [n] squared error of the target, summed over each cluster (a token's logits, a row, an element).
        baseline_sq: [n] the same of the baseline.
        confidence: of the two-sided interval.

    Returns:
        The ratio of root mean squares. Its interval is that of the logarithm, linearised (the infinitesimal
        jackknife), so it widens when few clusters carry the error.
    """
    a, b, n = target_sq.double(), baseline_sq.double(), target_sq.numel()
    total_a, total_b = float(a.sum()), float(b.sum())
    if not math.isfinite(total_a) or (total_b == 0 and total_a > 0):
        return Ratio(estimate=math.inf, low=math.inf, high=math.inf, n=n, se=0.0, null_se=0.0)
    if total_b == 0 or not math.isfinite(total_b) or n == 0:
        nan = math.nan
        return Ratio(estimate=nan, low=nan, high=nan, n=n, se=nan, null_se=nan)
    estimate = math.sqrt(total_a / total_b)
    if n < 2:
        return Ratio(estimate=estimate, low=0.0, high=math.inf, n=n, se=math.inf, null_se=math.inf)
    correction = n / (n - 1)
    share_b = b / total_b
    null_se = math.sqrt(0.5 * correction * float((share_b - 1 / n).square().sum()))
    if total_a == 0:
        return Ratio(estimate=0.0, low=0.0, high=0.0, n=n, se=0.0, null_se=null_se)
    se = 0.5 * math.sqrt(correction * float((a / total_a - share_b).square().sum()))
    half = student_t_quantile(0.5 + confidence / 2, n - 1) * se
    # A huge se overflows exp; the interval is then simply everything.
    high = estimate * math.exp(half) if half < 700 else math.inf
    return Ratio(estimate=estimate, low=estimate * math.exp(-half), high=high, n=n, se=se, null_se=null_se)


@dataclass(frozen=True, kw_only=True)
class TensorErrors:
    """How a target and a baseline differ from the same expected tensor.

    Attributes:
        n: elements compared.
        rows: rows compared (everything but the last dimension).
        relative_l2: of the target.
        baseline_relative_l2: of the baseline.
        rms: ratio over all elements.
        trimmed: the same without the elements where either error is among the largest 1% of both: what one outlier,
            in the target or in the baseline, can neither hide nor cause.
        worst_element: largest target error in units of its own scale, max(RMS of the baseline's errors, the
            baseline's relative error times the element's magnitude, the baseline's error there).
        baseline_element: third largest baseline error in units of the first two: how heavy its tail is, told by a
            value that no two outliers can move.
        worst_row: largest row RMS of the target in units of that row's scale, max(the baseline's RMS in that row, its
            median row, its relative error times the row's RMS); None for fewer than 2 rows or columns.
        row_width: elements in a row.
    """

    n: int
    rows: int
    row_width: int
    relative_l2: float
    baseline_relative_l2: float
    rms: Ratio
    trimmed: Ratio
    worst_element: float
    baseline_element: float
    worst_row: float | None


MIN_ROW_CLUSTERS = 16


def _clustered_ratio(a: Tensor, b: Tensor) -> Ratio:
    """Ratio over [rows, width] squared errors; the wider of the intervals by element and, with enough rows, by row."""
    by_element = rms_ratio(a.reshape(-1), b.reshape(-1))
    if a.shape[0] < MIN_ROW_CLUSTERS or a.shape[1] == 1:
        return by_element
    by_row = rms_ratio(a.sum(1), b.sum(1))
    return by_row if by_row.se >= by_element.se else by_element


def tensor_errors(target: Tensor, expected: Tensor, baseline: Tensor) -> TensorErrors:
    """Measure a three-way comparison of tensors of one shape; rows are everything but the last dimension."""
    width = expected.shape[-1] if expected.ndim else 1
    shape = (-1, width) if expected.numel() else (0, max(width, 1))
    e = expected.detach().double().reshape(shape)
    error_a = errors(target, expected).reshape(shape)
    error_b = errors(baseline, expected).reshape(shape)
    a, b = error_a.square(), error_b.square()
    n = a.numel()

    rms_b = math.sqrt(float(b.mean())) if n else math.nan
    base_l2 = relative_l2(baseline, expected)
    proportional = torch.where(torch.isfinite(e), e.abs(), 0) * base_l2
    scale = proportional.clamp_min(rms_b)
    # 0 / 0 is no error at all; anything over a scale of 0 is infinitely wrong.
    relative_a = torch.where(error_a == 0, 0.0, error_a.abs() / torch.maximum(scale, error_b.abs()))
    relative_b = torch.where(error_b == 0, 0.0, error_b.abs() / scale)
    third = min(3, n)

    pooled = torch.maximum(error_a.abs(), error_b.abs()).reshape(-1)
    kept = pooled <= pooled.kthvalue(max(1, math.floor(0.99 * n))).values if n else pooled.bool()
    kept = kept.reshape(a.shape)
    zero = torch.zeros((), dtype=a.dtype)

    worst_row = None
    if a.shape[0] >= 2 and a.shape[1] >= 2:
        row_a, row_b = a.mean(1), b.mean(1)
        row_scale = torch.maximum(row_b, proportional.square().mean(1)).clamp_min(float(row_b.median()))
        worst_row = math.sqrt(float(torch.where(row_a == 0, zero, row_a / row_scale).amax()))
    return TensorErrors(
        n=n,
        rows=a.shape[0],
        row_width=a.shape[1],
        relative_l2=relative_l2(target, expected),
        baseline_relative_l2=base_l2,
        rms=_clustered_ratio(a, b),
        trimmed=_clustered_ratio(torch.where(kept, a, zero), torch.where(kept, b, zero)),
        worst_element=float(relative_a.amax()) if n else math.nan,
        baseline_element=float(relative_b.reshape(-1).topk(third).values[-1]) if n else math.nan,
        worst_row=worst_row,
    )


@dataclass(frozen=True, kw_only=True)
class RowErrors:
    """Errors of `n` rows (a token's logits, say) against the reference; every tensor is [n] float64.

    Attributes:
        sq: sum of squared errors over the row.
        linf: largest absolute error.
        gain: <actual - expected, expected> / <expected, expected>: the part of the error that is a mere rescaling.
        expected_sq: sum of squares of the expected row.
        width: elements in a row.
    """

    sq: Tensor
    linf: Tensor
    gain: Tensor
    expected_sq: Tensor
    width: int

    @property
    def n(self) -> int:
        return self.sq.numel()

    @property
    def l2(self) -> Tensor:
        return self.sq.sqrt()


# Elements that are in float64 at a time: they stay in a core's cache, which is seven times faster than more of them.
AT_ONCE = 256 * 1024


def row_errors(actual: Tensor, expected: Tensor) -> RowErrors:
    """Compare rows [n, width] of any float dtype."""
    if actual.shape != expected.shape:
        raise ValueError(f"rows of shape {tuple(actual.shape)} against {tuple(expected.shape)}")
    rows_at_once = max(1, AT_ONCE // expected.shape[-1])
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, expected.shape[0], rows_at_once):
        e = expected[start : start + rows_at_once].detach().double()
        error = errors(actual[start : start + rows_at_once], e)
        expected_sq = e.square().sum(-1)
        projection = torch.linalg.vecdot(error, e)
        # A wholly zero expected row has no direction to be rescaled along.
        gain = torch.where(expected_sq > 0, projection / expected_sq, torch.zeros_like(projection))
        parts.append((error.square().sum(-1), error.abs().amax(-1), gain, expected_sq))
    empty = torch.empty(0, dtype=torch.float64)
    sq, linf, gain, expected_sq = (torch.cat(column) for column in zip(*parts, strict=True)) if parts else [empty] * 4
    # inf * 0 is NaN: where the error is infinite, so is its gain.
    gain = torch.where(torch.isfinite(sq), gain, torch.full_like(gain, math.inf))
    return RowErrors(sq=sq, linf=linf, gain=gain, expected_sq=expected_sq, width=expected.shape[-1])


# Below these nothing is wrong, in units of float32's eps: Hugging Face's two attention implementations are bitwise
# equal at most sites, so their difference alone would be no scale. Measured on 20 clean variants of a 6-layer model,
# 39 sites each: RMS error up to 0.7 of the RMS floor, L-inf up to 7.2 of it, row gain up to 0.92 of the gain floor.
FLOAT32_EPS = 2.0**-23
RMS_FLOOR = 4 * FLOAT32_EPS
LINF_FLOOR = 20 * RMS_FLOOR
GAIN_FLOOR = FLOAT32_EPS / 2


@dataclass(frozen=True, kw_only=True)
class ModelErrors:
    """An arm's errors over all compared rows in units of the baseline's, each unit no smaller than its floor.

    Attributes:
        rms: ratio of pooled RMS errors, clustered by token, for "all" rows and for those of each phase.
        worst_row: largest RMS error of a row, in units of max(the baseline's in that row, its median row, its pooled
            relative error times the row's RMS): what an average over many right rows cannot dilute.
        linf: largest absolute error over the baseline's largest.
        gain: RMS over rows of the relative rescaling, over the baseline's: what a wrong scale or epsilon moves most.
        worst_index: index of the row that `worst_row` is about.
        relative_l2: error over expected, in the Euclidean norm.
    """

    rms: dict[str, Ratio]
    worst_row: float
    worst_index: int
    linf: float
    gain: float
    relative_l2: float


def model_errors(actual: RowErrors, baseline: RowErrors, phases: Sequence[str]) -> ModelErrors:
    """Put an arm's errors in units of the baseline's.

    Args:
        actual: errors of the arm, [n] rows.
        baseline: errors of the baseline in the same rows, against the same expected rows.
        phases: for each row "prefill" or "decode".
    """
    n, width, e = actual.n, actual.width, actual.expected_sq
    rms: dict[str, Ratio] = {}
    for phase in ("all", *dict.fromkeys(phases)):
        rows = torch.tensor([phase in ("all", found) for found in phases])
        floor = e[rows] * RMS_FLOOR**2
        unit = baseline.sq[rows]
        rms[phase] = rms_ratio(actual.sq[rows], unit if float(unit.sum()) >= float(floor.sum()) else floor)
    total = float(e.sum())
    relative_sq = max(float(baseline.sq.sum()) / total if total else 0.0, RMS_FLOOR**2)
    unit = torch.maximum(baseline.sq, e * relative_sq).clamp_min(float(baseline.sq.median()))
    by_row = torch.where(actual.sq == 0, 0.0, actual.sq / unit).sqrt()
    rms_expected = math.sqrt(total / (n * width))
    worst = int(by_row.argmax())

    def over(value: float, unit: float) -> float:
        return 0.0 if value == 0 else value / unit if unit else math.inf

    return ModelErrors(
        rms=rms,
        worst_row=float(by_row[worst]),
        worst_index=worst,
        linf=over(float(actual.linf.amax()), max(float(baseline.linf.amax()), LINF_FLOOR * rms_expected)),
        gain=over(_rms(actual.gain), max(_rms(baseline.gain), GAIN_FLOOR)),
        relative_l2=math.sqrt(float(actual.sq.sum()) / total) if total else math.inf,
    )


def channel_linf(actual: Tensor, expected: Tensor) -> float:
    """Return the largest error of [n, width], channels above the tensor's RMS scaled down to it.

    Real checkpoints have a few channels that are ten times larger than the rest. Their rounding is that much larger
    too, and an L-inf in units of the whole tensor's RMS would call it a fault.
    """
    e = expected.detach().double()
    square = e.square()
    rms, channels = square.mean().sqrt(), square.mean(0).sqrt()
    above = torch.where(rms > 0, (channels / rms).clamp_min(1.0), torch.ones_like(channels))
    return float((errors(actual, e).abs() / above).amax())


def in_floors(actual: RowErrors, baseline: RowErrors, *, linf: tuple[float, float], slack: float) -> dict[str, float]:
    """Return RMS error, largest error and row gain in units of their fp32 floors.

    Args:
        actual: errors of the arm.
        baseline: errors of the baseline in the same rows.
        linf: `channel_linf` of both.
        slack: the unit is this times the baseline's error where that exceeds the floor.
    """
    rms_expected = math.sqrt(float(actual.expected_sq.mean()) / actual.width)

    def rms(errors: RowErrors) -> float:
        return math.sqrt(float(errors.sq.mean()) / errors.width)

    pairs = {
        "rms_in_floors": (rms(actual), rms(baseline), RMS_FLOOR * rms_expected),
        "linf_in_floors": (*linf, LINF_FLOOR * rms_expected),
        "gain_in_floors": (_rms(actual.gain), _rms(baseline.gain), GAIN_FLOOR),
    }
    return {
        name: 0.0 if value == 0 else value / unit if (unit := max(slack * other, floor)) else math.inf
        for name, (value, other, floor) in pairs.items()
    }


def _rms(values: Tensor) -> float:
    return math.sqrt(float(values.square().mean()))
