"""The accuracy part of the page: error by position, top-k errors, verdicts and the module table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from pilotage.core.nouns import Status, worst
from pilotage.report import figures
from pilotage.report.figures import Interval, Line
from pilotage.report.text import number, status_of

MAX_STREAMS = 6  # panels in one row of small multiples; the rest is counted, and its worst stream is always shown


def ratio_figure(verdict: Mapping[str, Any]) -> Markup | None:
    """The estimate of a ratio verdict on an axis with 1 and the bound; None where there is nothing to draw."""
    estimate, bound = number(verdict.get("estimate")), number(verdict.get("bound"))
    if "ratio" not in str(verdict.get("metric")) or estimate is None or bound is None or estimate <= 0 or bound <= 0:
        return None
    interval = verdict.get("interval") or [None, None]
    row = Interval(value=estimate, low=number(interval[0]), high=number(interval[1]))
    marks = (1.0, bound)
    scale = figures.ratio_scale([row], marks=marks)
    css = {Status.PASS: "pass", Status.FAIL: "fail", Status.NOT_MEASURED: "none"}[status_of(verdict.get("status"))]
    return figures.ratio_bar(row, scale=scale, marks=marks, css=css, width=120)


def verdict_row(verdict: Mapping[str, Any], *, context: str = "") -> dict[str, Any]:
    """A verdict ready for the table of verdicts."""
    return {**verdict, "context": context, "status": status_of(verdict.get("status")), "figure": ratio_figure(verdict)}


def _values(rows: Sequence[Mapping[str, Any]], arm: str, metric: str) -> list[tuple[float, float]]:
    found = []
    for row in rows:
        value = number((row.get(arm) or {}).get(metric))
        position = number(row.get("position"))
        if value is not None and position is not None:
            found.append((position, value))
    return found


def _streams(by_position: Sequence[Mapping[str, Any]]) -> dict[Any, list[Mapping[str, Any]]]:
    streams: dict[Any, list[Mapping[str, Any]]] = {}
    for row in by_position:
        streams.setdefault(row.get("stream", 0), []).append(row)
    for rows in streams.values():
        rows.sort(key=lambda row: number(row.get("position")) or 0.0)
    return streams


def _chosen(streams: Mapping[Any, list[Mapping[str, Any]]], metric: str) -> list[Any]:
    """The streams that get a panel: the one with the largest target error, then the longest."""
    names = list(streams)
    if len(names) <= MAX_STREAMS:
        return names
    worst = max(names, key=lambda name: max((y for _, y in _values(streams[name], "target", metric)), default=-1.0))
    longest = sorted(names, key=lambda name: -len(streams[name]))
    kept = [worst, *[name for name in longest if name != worst]][:MAX_STREAMS]
    return [name for name in names if name in kept]


def position_panels(arm: Mapping[str, Any], metric: str) -> list[Markup]:
    """Small multiples for one arm: a panel a stream, error of target and baseline against HF fp32 by position.

    Args:
        arm: an entry of `arms` in the JSON of `pilotage validate`.
        metric: "l2", "linf" or "kl".
    """
    streams = _streams(arm.get("by_position") or [])
    chosen = _chosen(streams, metric)
    dtype = arm.get("arm", "")
    curves = {name: (_values(streams[name], "target", metric), _values(streams[name], "baseline", metric))
              for name in chosen}  # fmt: skip
    values = [y for pair in curves.values() for points in pair for _, y in points]
    if not values:
        return []
    y_decades = figures.decades(values)
    panels = []
    for name in chosen:
        target, baseline = curves[name]
        positions = [x for points in (target, baseline) for x, _ in points]
        if not positions:
            continue
        decoded = [number(row.get("position")) for row in streams[name] if row.get("phase") == "decode"]
        starts = [x for x in decoded if x is not None]
        panels.append(
            figures.error_panel(
                title=f"stream {name}, {len(streams[name])} tokens",
                lines=[
                    Line(label=f"HF {dtype}", css="baseline", points=baseline),
                    Line(label=f"pilotage {dtype}", css="target", points=target),
                ],
                y_decades=y_decades,
                x_range=(min(positions), max(positions)),
                decode_from=min(starts) if starts else None,
            )
        )
    return panels


def worst_panel(arm: Mapping[str, Any]) -> dict[str, Any] | None:
    """The one panel of an arm for the top of the page: its stream with the most positions, worst error first."""
    streams = _streams(arm.get("by_position") or [])
    if not streams:
        return None
    largest = max(
        streams,
        key=lambda name: (len(streams[name]), max((y for _, y in _values(streams[name], "target", "l2")), default=0)),
    )
    only = {**arm, "by_position": streams[largest]}
    panels = position_panels(only, "l2")
    if not panels:
        return None
    dtype = arm.get("arm", "")
    return {
        "caption": f"Logit error against HF float32, {dtype}",
        "figure": panels[0],
        "baseline": "Hugging Face, other attention" if dtype == "float32" else f"Hugging Face, {dtype}",
    }


def arm_view(arm: Mapping[str, Any]) -> dict[str, Any]:
    """One arm (a dtype) of the validation, ready for the template."""
    by_position = arm.get("by_position") or []
    topk = [
        {
            "k": k,
            "target": errors.get("target"),
            "baseline": errors.get("baseline"),
            "ratio": errors.get("ratio"),
        }
        for k, errors in (arm.get("topk_errors") or {}).items()
        if isinstance(errors, Mapping)
    ]
    agreed = [(row.get("target") or {}).get("top1") for row in by_position]
    known = [bool(value) for value in agreed if value is not None]
    return {
        "name": arm.get("arm", "?"),
        "status": status_of(arm.get("status")),
        "verdicts": [verdict_row(verdict, context=str(arm.get("arm", ""))) for verdict in arm.get("verdicts") or []],
        "n_tokens": arm.get("n_tokens"),
        "n_streams": len(_streams(by_position)),
        "shown_streams": len(_chosen(_streams(by_position), "l2")),
        "panels": position_panels(arm, "l2"),
        "worst_panels": position_panels(arm, "linf"),
        "topk": topk,
        "ties": arm.get("ties") or [],
        "n_ties": sum(1 for tie in arm.get("ties") or [] if tie.get("tie") is True),
        "baseline": arm.get("baseline"),
        "top1": {"agree": sum(known), "of": len(known)} if known else None,
    }


def module_summary(modules: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The module table by kind and dtype: how many of each status, and the one that comes closest to its bound."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in module_rows(modules):
        groups.setdefault((str(row["kind"]), str(row["dtype"])), []).append(row)
    summary = []
    for (kind, dtype), rows in groups.items():
        statuses = [row["status"] for row in rows]
        closest = max(rows, key=_closeness)
        summary.append(
            {
                "kind": kind,
                "dtype": dtype,
                "n": len(rows),
                "passed": statuses.count(Status.PASS),
                "failed": statuses.count(Status.FAIL),
                "not_measured": statuses.count(Status.NOT_MEASURED),
                "status": worst(statuses),
                "closest": closest,
            }
        )
    order = {Status.FAIL: 0, Status.NOT_MEASURED: 1, Status.PASS: 2}
    return sorted(summary, key=lambda row: order[row["status"]])


def _closeness(row: Mapping[str, Any]) -> float:
    estimate, bound = number(row.get("estimate")), number(row.get("bound"))
    return estimate / bound if estimate is not None and bound else -1.0


def module_rows(modules: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The module table: failing modules first, then in the order of the model."""
    rows = [
        {
            "module": module.get("module", "?"),
            "kind": module.get("kind", ""),
            "dtype": module.get("dtype", ""),
            **{key: value for key, value in (module.get("verdict") or {}).items()},
            "status": status_of((module.get("verdict") or {}).get("status")),
            "figure": ratio_figure(module.get("verdict") or {}),
        }
        for module in modules
    ]
    order = {Status.FAIL: 0, Status.NOT_MEASURED: 1, Status.PASS: 2}
    return sorted(rows, key=lambda row: order[row["status"]])
