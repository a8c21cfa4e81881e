"""The gates of tasks, prompts and the KV cache; with `gates`, the only places that say pass or fail.

The rules of `gates` hold here too: a whole interval on one side of the bound or no verdict, and rules joined by AND.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pilotage.accuracy import error_laws, gates, metrics
from pilotage.core.nouns import Status, Verdict, worst

if TYPE_CHECKING:
    from pilotage.accuracy.kv import KVErrors

# Logits against a baseline without controls. Clean implementations of one model lie within 1.23 of each other in
# pooled RMS (20 variants, 6 layers), and no single row or logit of theirs was further off than these.
LOGIT_RATIO_BOUND = 1.3
LOGIT_EXTREME_BOUND = 4.0
# Where two tokens swap places, each of their logits may be off by the baseline's largest error, and that varies.
DIVERGENCE_SLACK = 3.0

# A drop, or a rise, is a fail when chance makes one as large less often than this.
TASK_ALPHA = 0.001
# How far apart two scores may be, as shares, and still count as equal: what an interval must stay within to pass. A
# 95% interval of 214 items of which rounding changes 2% reaches 0.035; two independent samples would reach 0.13.
TASK_MARGIN = 0.05
MIN_TASK_ITEMS = 30


def within(
    values: Tensor, known: Tensor, bound: Tensor, *, claim: str, metric: str, source: str, **evidence: Any
) -> Verdict:
    """Judge that every row's value is within its bound.

    Args:
        values: [n] values; where not known, what they are at least.
        known: [n] bool.
        bound: [n] or a scalar tensor.
        claim, metric, source: of the verdict.
        evidence: added to it.
    """
    n = values.numel()
    if not n:
        return gates.single(Status.NOT_MEASURED, claim, metric, "no rows to compare", **evidence)
    bounds = bound.double().expand(n)
    over = ~(values <= bounds)  # NaN is over
    unknown = int((~known).sum())
    # The row that is worst in units of its own bound says most.
    units = torch.where(bounds > 0, values / bounds, torch.where(values > 0, math.inf, 0.0))
    worst = int(torch.where(units.isnan(), math.inf, units).argmax())
    status = Status.FAIL if bool(over.any()) else Status.NOT_MEASURED if unknown else Status.PASS
    found = {**evidence, "row": worst, "rows_over": int(over.sum())}
    if unknown:
        found["rows_not_measured"] = unknown
    value = float(values[worst])
    return Verdict(
        claim=claim,
        metric=metric,
        estimate=value if math.isfinite(value) else None,
        bound=float(bounds[worst]),
        bound_source=source if not unknown else f"{source}; {unknown} rows lack logits that the source did not return",
        n=n,
        status=status,
        evidence=found,
    )


def three_way_rows(
    target: metrics.RowErrors, baseline: metrics.RowErrors, *, name: str, evidence: Mapping[str, Any] | None = None
) -> list[Verdict]:
    """Judge rows of logits by a baseline of which there are no controls.

    Args:
        target: errors of the target.
        baseline: errors of the baseline in the same rows.
        name: what is compared.
        evidence: added to the pooled verdict.

    Returns:
        The pooled ratio clustered by row, the worst row and the largest error.
    """
    if not target.n:
        return [gates.single(Status.NOT_MEASURED, f"{name}: compared", "rms_ratio", "no rows to compare")]
    measured = metrics.model_errors(target, baseline, ["row"] * target.n)
    ratio = measured.rms["all"]
    bound = LOGIT_RATIO_BOUND * gates.null_allowance(ratio, target.n * target.width)
    if not math.isfinite(ratio.estimate):
        status = Status.FAIL
    elif target.n < 2:
        status = Status.NOT_MEASURED
    else:
        status = gates.by_interval(ratio.low, ratio.high, bound)
    verdicts = [
        Verdict(
            claim=f"{name}: error no larger than the baseline's",
            metric="rms_ratio",
            estimate=ratio.estimate if math.isfinite(ratio.estimate) else None,
            interval=(ratio.low, ratio.high) if math.isfinite(ratio.high) else None,
            bound=bound if math.isfinite(bound) else None,
            bound_source=(
                f"{LOGIT_RATIO_BOUND} times what two draws of the baseline's error law may differ by with n={ratio.n}"
            ),
            n=ratio.n,
            status=status,
            evidence={"relative_l2": measured.relative_l2, **(evidence or {})},
        )
    ]
    for text, metric, value in (
        ("no single token is far off", "worst_row", measured.worst_row),
        ("no single logit is far off", "linf_ratio", measured.linf),
    ):
        verdicts.append(
            Verdict(
                claim=f"{name}: {text}",
                metric=metric,
                estimate=value if math.isfinite(value) else None,
                bound=LOGIT_EXTREME_BOUND,
                bound_source=f"{LOGIT_EXTREME_BOUND:g} times the baseline's",
                n=target.n,
                status=gates.by_value(value, LOGIT_EXTREME_BOUND),
                evidence={"row": measured.worst_index} if metric == "worst_row" else {},
            )
        )
    return verdicts


def by_controls(
    value: float,
    interval: tuple[float, float] | None,
    controls: Mapping[str, float],
    *,
    claim: str,
    metric: str,
    n: int,
    evidence: Mapping[str, Any],
) -> Verdict:
    """Hold one statistic against the 99.9% prediction limit of the same statistic over clean controls.

    Args:
        value: of the target.
        interval: of the target, or None for a statistic without one.
        controls: name -> the statistic (its interval's upper end where there is one) of each clean control.
        claim, metric, n: of the verdict.
        evidence: of the verdict; the controls are added.
    """
    values = list(controls.values())
    bound: float | None = None
    if not math.isfinite(value):
        status, source = Status.FAIL, "not finite where the reference is"
    elif len(values) < gates.MIN_CONTROLS or statistics.median(values) == 0:
        status, source = Status.NOT_MEASURED, f"{len(values)} clean controls; a bound needs {gates.MIN_CONTROLS}"
    else:
        spread = gates.MIN_CONTROL_SPREAD if interval else gates.MIN_EXTREME_SPREAD
        bound = max(gates.MIN_MODEL_BOUND, gates.control_bound(values, spread=spread))
        source = f"99.9% prediction limit from {len(values)} clean controls of this model"
        status = gates.by_interval(*interval, bound) if interval else gates.by_value(value, bound)
    return Verdict(
        claim=claim,
        metric=metric,
        estimate=value if math.isfinite(value) else None,
        interval=interval if interval and all(map(math.isfinite, interval)) else None,
        bound=bound,
        bound_source=source,
        n=n,
        status=status,
        evidence={**evidence, "controls": dict(controls)},
    )


def kv_tensor(measured: KVErrors, *, name: str) -> list[Verdict]:
    """Judge cached keys or values of one layer by a baseline of which there are no controls.

    The bootstrapped ratio, the same without the largest 1% of errors (what an outlier can neither hide nor cause), and
    the worst head at any token. The Bhattacharyya coefficient is in the evidence with what it would have said.
    """
    claim = f"{name}: error no larger than the baseline's"
    if not measured.n:
        return [gates.single(Status.NOT_MEASURED, claim, "rms_ratio", "nothing to compare")]
    verdicts = []
    for text, metric, ratio in (
        ("", "rms_ratio", measured.ratio),
        (" without the largest 1%", "trimmed_rms_ratio", measured.trimmed),
    ):
        bound = gates.TENSOR_RATIO_BOUND * gates.null_allowance(ratio, measured.elements)
        if math.isnan(ratio.estimate):
            status = Status.PASS  # neither arm errs
        else:
            status = Status.FAIL if math.isinf(ratio.estimate) else gates.by_interval(ratio.low, ratio.high, bound)
        finite = math.isfinite(ratio.estimate)
        verdicts.append(
            Verdict(
                claim=claim + text,
                metric=metric,
                estimate=ratio.estimate if finite else None,
                interval=(ratio.low, ratio.high) if finite and math.isfinite(ratio.high) else None,
                bound=bound if math.isfinite(bound) else None,
                bound_source=(
                    f"{gates.TENSOR_RATIO_BOUND} times what two draws of the baseline's error law may differ by with "
                    f"n={ratio.n} tokens"
                ),
                n=ratio.n,
                status=status,
            )
        )
    bound = gates.ROW_BOUND * (1 + math.sqrt(2 * math.log(max(measured.rows, 2)) / measured.width))
    verdicts.append(
        Verdict(
            claim=f"{name}: no head at any token is far off",
            metric="worst_row",
            estimate=measured.worst_row if math.isfinite(measured.worst_row) else None,
            bound=bound,
            bound_source=f"{gates.ROW_BOUND:g} times the largest of {measured.rows} clean rows of {measured.width}",
            n=measured.rows,
            status=gates.by_value(measured.worst_row, bound),
            evidence={"token": measured.worst_at[0], "head": measured.worst_at[1]},
        )
    )
    said = bhattacharyya_says(measured.bhattacharyya, error_laws.CRITERION)
    decided = worst([verdict.status for verdict in verdicts])
    evidence = {
        "bhattacharyya": measured.bhattacharyya,
        "criterion": error_laws.CRITERION,
        "bhattacharyya_says": said.value,
        "disagree": said is not decided,
        "least_cosine": measured.least_cosine,
    }
    return [dataclasses.replace(verdicts[0], evidence=evidence), *verdicts[1:]]


def bhattacharyya_says(coefficient: float, criterion: float) -> Status:
    """Apply the guide's rule; reported, never decisive."""
    if math.isnan(coefficient):
        return Status.NOT_MEASURED
    return Status.PASS if coefficient >= criterion else Status.FAIL


def paired(
    estimate: float, interval: tuple[float, float], p_value: float, n: int, *, task: str, metric: str, **evidence: Any
) -> Verdict:
    """Judge the mean difference of item scores, target minus reference.

    A fail needs a difference that chance makes less often than `TASK_ALPHA`; a pass needs an interval that stays
    within `TASK_MARGIN` of no difference. Many items that agree pass, few items say nothing.
    """
    if p_value < TASK_ALPHA:
        status = Status.FAIL
    elif n >= MIN_TASK_ITEMS and interval[0] >= -TASK_MARGIN and interval[1] <= TASK_MARGIN:
        status = Status.PASS
    else:
        status = Status.NOT_MEASURED
    return Verdict(
        claim=f"{task}: {metric} is that of the reference on the same items",
        metric=f"{metric}_difference",
        estimate=estimate if n else None,
        interval=interval if n else None,
        bound=TASK_MARGIN,
        bound_source=(
            f"fail: paired test below {TASK_ALPHA:g}; pass: the 95% interval of the paired difference stays within "
            f"{TASK_MARGIN:g}"
        ),
        n=n,
        status=status,
        evidence={"p_value": p_value, **evidence},
    )


def threshold(
    score: float | None,
    interval: tuple[float, float] | None,
    n: int,
    *,
    task: str,
    metric: str,
    low: float,
    high: float | None,
    source: str,
) -> Verdict:
    """Judge a score by what the user demanded: a minimum, or a range around a mean.

    Args:
        score: of the target; None where it was not computed.
        interval: of the score, for information: the demand is on the score itself.
        n: items.
        task, metric: what was scored.
        low: smallest score that passes.
        high: largest, or None.
        source: the demand in words.
    """
    claim = f"{task}: {metric} is at least {low:g}" if high is None else f"{task}: {metric} is {low:g} to {high:g}"
    if score is None or not n or math.isnan(score):
        return gates.single(Status.NOT_MEASURED, claim, metric, "no items were scored")
    # Sums of decimal fractions: a score that equals the threshold on paper passes.
    slack = 1e-9
    good = score >= low - slack and (high is None or score <= high + slack)
    return Verdict(
        claim=claim,
        metric=metric,
        estimate=score,
        interval=interval,
        bound=low if high is None or score < low else high,
        bound_source=source,
        n=n,
        status=Status.PASS if good else Status.FAIL,
        evidence={"low": low, "high": high},
    )
