"""From the rows of a site to its score: pure functions.

A site's error is measured in the same rows for the target and for the clean controls, in five statistics: pooled over
all rows and over those of each phase (what averages over everything), the worst row and the largest element (what an
average hides), and the gain (what a wrong scale or epsilon moves while everything else stays in the noise). The unit of
each is the largest that a control makes of it, no smaller than the floor of the dtype; a bound is so many units. A
look-up in a half precision has no noise at all: there every bit counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pilotage.accuracy import gates, metrics
from pilotage.core.nouns import Status

# In fp32 only one control computes attention otherwise, and no control in blocks as a kernel does: on Gemma 3 270M that
# alone reached 1.6 (pooled), 5.9 (row), 2.3 (element) and 4.3 (gain). The least of real faults there is 2500.
ATTENTION_SLACK = 4.0
# A pooled gain is measured with an error of its own; the unit is so many of them.
GAIN_ERRORS = 2.0
EXACTER = 2.0
# In units of the largest control. Clean models, in process, compiled and on two ranks, reached at most: pooled 1.0, row
# 1.7, element 1.15, gain 2.1 (docs/localise.md).
BOUNDS = {"rms": 1.4, "row": 3.0, "element": 4.0, "gain": 3.0, "unlike": 1.0}


@dataclass(frozen=True, kw_only=True)
class Floors:
    """Below these nothing is wrong, relative to the RMS of what is expected.

    Attributes:
        rms: of the pooled error.
        element: of a single element.
        gain: of the rescaling.
    """

    rms: float
    element: float
    gain: float


def floors(dtype: torch.dtype) -> Floors:
    """Return the floors of a dtype: float32 as measured, a half precision as one rounding of the result."""
    if dtype is torch.float32:
        return Floors(rms=metrics.RMS_FLOOR, element=metrics.LINF_FLOOR, gain=metrics.GAIN_FLOOR)
    eps = torch.finfo(dtype).eps
    # A value is half a spacing off at most and a quarter on average; the gain of many roundings averages out.
    return Floors(rms=eps / 6, element=2 * eps, gain=eps / 64)


@dataclass(frozen=True, kw_only=True)
class SiteErrors:
    """What one arm makes of one site.

    Attributes:
        rows: errors of every row.
        element: largest error, large channels scaled down (see `metrics.channel_linf`).
        bias: pooled signed rescaling, <a - e, e> / <e, e>.
    """

    rows: metrics.RowErrors
    element: float
    bias: float

    def taken(self, rows: Tensor) -> SiteErrors:
        """Return the errors of some rows [n] bool; element and bias stay those of all of them."""
        of = self.rows
        some = metrics.RowErrors(
            sq=of.sq[rows],
            linf=of.linf[rows],
            gain=of.gain[rows],
            expected_sq=of.expected_sq[rows],
            width=of.width,
        )
        return SiteErrors(rows=some, element=self.element, bias=self.bias)


def measure(actual: Tensor, expected: Tensor) -> SiteErrors:
    """Compare the rows [n, width] of a site."""
    rows = metrics.row_errors(actual, expected)
    total = float(rows.expected_sq.sum())
    bias = float((rows.gain * rows.expected_sq).sum()) / total if total else 0.0
    return SiteErrors(rows=rows, element=metrics.channel_linf(actual, expected), bias=bias)


@dataclass(frozen=True, kw_only=True)
class Score:
    """How far a site is from what clean computations make of it.

    Attributes:
        value: the largest statistic over its bound: above 1 the site is at fault.
        statistic: which one that is, e.g. "rms", "rms_decode", "row".
        status: fail above the bound, not_measured where the reference is not finite.
        ratio: pooled RMS error in units of the largest control.
        relative: pooled RMS error over the RMS of what is expected.
        statistics: every statistic, in its unit.
        bounds: of each statistic, in the same unit.
        worst: index of the worst row.
        by_row: [rows] error of each row in the row statistic's unit.
    """

    value: float
    statistic: str
    status: Status
    ratio: float
    relative: float
    statistics: Mapping[str, float]
    bounds: Mapping[str, float]
    worst: int
    by_row: Tensor

    def to_json(self) -> dict[str, Any]:
        return {
            "score": finite(self.value),
            "statistic": self.statistic,
            "status": self.status.value,
            "ratio": finite(self.ratio),
            "relative_error": finite(self.relative),
            "statistics": {name: finite(value) for name, value in self.statistics.items()},
            "bounds": dict(self.bounds),
            "wrong_rows": float((self.by_row > BOUNDS["row"]).double().mean()) if self.by_row.numel() else 0.0,
        }


# What an infinite score is written as: JSON has no word for it, and it must still rank first.
LARGEST = 1e30


def finite(value: float) -> float:
    """Return `value`, the largest number for what is infinite or no number."""
    return value if math.isfinite(value) else LARGEST


def score(
    target: SiteErrors,
    controls: Sequence[SiteErrors],
    phases: Sequence[str],
    dtype: torch.dtype,
    floor: Floors,
    *,
    rounds_once: bool = False,
    slack: float = 1.0,
    unlike: float | None = None,
) -> Score:
    """Score a site.

    Args:
        target: errors of the target.
        controls: errors of the clean controls in the same rows, at least one.
        phases: phase of each row.
        dtype: of the arm. In float32 the gain is that of single rows, in a half precision, where rounding moves
            those, that of all rows together.
        floor: of that dtype.
        slack: factor on every bound, see `ATTENTION_SLACK`.
        rounds_once: the site is a look-up or a single product, which no fused arithmetic computes more exactly.
        unlike: share of elements that are not the first control's, where all that is correct gives the same bits.
    """
    e, sq = target.rows.expected_sq, target.rows.sq
    if not bool(torch.isfinite(e).all()):
        return Score(
            value=0.0,
            statistic="none",
            status=Status.NOT_MEASURED,
            ratio=math.nan,
            relative=math.nan,
            statistics={},
            bounds={},
            worst=0,
            by_row=torch.zeros(0),
        )
    width = target.rows.width
    statistics: dict[str, float] = {}
    bounds: dict[str, float] = {}
    alike = dtype is not torch.float32 and all(torch.equal(c.rows.sq, controls[0].rows.sq) for c in controls)
    for phase in ("all", *dict.fromkeys(phases)):
        rows = torch.tensor([phase in ("all", found) for found in phases])
        made, least = max(float(c.rows.sq[rows].sum()) for c in controls), floor.rms**2 * float(e[rows].sum())
        unit = max(made, least)
        name = "rms" if phase == "all" else f"rms_{phase}"
        statistics[name] = _over(math.sqrt(float(sq[rows].sum())), math.sqrt(unit))
        # Below the floor the controls round less than once, and once is nobody's fault.
        bounds[name] = _pooled_bound(int(rows.sum()) * width if alike and made > least else None)
    by_row = _by_row(target, controls, floor)
    worst = int(by_row.argmax())
    statistics["row"] = float(by_row[worst])
    size = math.sqrt(float(e.mean()) / width)
    unit = max(*(c.element for c in controls), floor.element * size)
    statistics["element"] = _over(target.element, unit)
    statistics["gain"] = _gain(target, controls, dtype, floor, rounds_once)
    if unlike is not None:
        statistics["unlike"] = unlike / gates.MAX_UNLIKE

    bounds = {name: slack * bounds.get(name, BOUNDS[name.split("_")[0]]) for name in statistics}
    scores = {name: value / bounds[name] for name, value in statistics.items()}
    # NaN is the largest there is.
    statistic = max(scores, key=lambda name: math.inf if math.isnan(scores[name]) else scores[name])
    value = scores[statistic]
    total = float(e.sum())
    return Score(
        value=math.inf if math.isnan(value) else value,
        statistic=statistic,
        status=gates.by_value(value, 1.0),
        ratio=statistics["rms"],
        relative=math.sqrt(float(sq.sum()) / total) if total else (0.0 if not float(sq.sum()) else math.inf),
        statistics=statistics,
        bounds=bounds,
        worst=worst,
        by_row=by_row,
    )


def _pooled_bound(elements: int | None) -> float:
    """Bound the pooled error, over so many elements of a site where all controls are alike, None for another site.

    Where every control has the same error to the bit, nothing is summed and there is one way to round.
    """
    return BOUNDS["rms"] if elements is None else min(BOUNDS["rms"], gates.alike_bound(elements))


def _by_row(target: SiteErrors, controls: Sequence[SiteErrors], floor: Floors) -> Tensor:
    """Return each row's error in units of the largest that a control makes there, or of what its size lets expect."""
    e = target.rows.expected_sq
    total = float(e.sum())
    unit = torch.stack([c.rows.sq for c in controls]).amax(0)
    largest = max(float(c.rows.sq.sum()) for c in controls)
    relative = max(largest / total if total else 0.0, floor.rms**2)
    unit = torch.maximum(unit, e * relative).clamp_min(float(unit.median()))
    zero = torch.zeros((), dtype=e.dtype)
    return torch.where(target.rows.sq == 0, zero, target.rows.sq / unit).sqrt()


def _gain(
    target: SiteErrors, controls: Sequence[SiteErrors], dtype: torch.dtype, floor: Floors, rounds_once: bool
) -> float:
    if dtype is torch.float32:
        unit = max(*(_rms(c.rows.gain) for c in controls), floor.gain)
        return _over(_rms(target.rows.gain), unit)
    # What Hugging Face rounds (a scale, say) is part of the model: the distance to its own bias counts.
    home = controls[0]
    # Fused arithmetic leaves out roundings, and is nearer to the truth than Hugging Face. In bias and size alike that
    # is no fault; in bias alone it has to be a lot.
    exacter = abs(target.bias) < abs(home.bias) and not rounds_once
    if exacter and float(target.rows.sq.sum()) <= float(home.rows.sq.sum()):
        return 0.0
    least = floor.gain * (EXACTER if exacter else 1.0)
    unit = max(*(abs(c.bias - home.bias) for c in controls), GAIN_ERRORS * _bias_error(target, home), least)
    return _over(abs(target.bias - home.bias), unit)


def _bias_error(target: SiteErrors, home: SiteErrors) -> float:
    """Return the standard error of the difference of two biases, from the rows' own."""
    e = target.rows.expected_sq
    total = float(e.sum())
    if not total:
        return 0.0
    difference = target.rows.gain - home.rows.gain
    mean = float((difference * e).sum()) / total
    return float(((difference - mean) * e).norm()) / total


def _rms(values: Tensor) -> float:
    return math.sqrt(float(values.square().mean()))


def _over(value: float, unit: float) -> float:
    return 0.0 if value == 0 else value / unit if unit else math.inf
