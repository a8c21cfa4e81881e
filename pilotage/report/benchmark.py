"""The benchmark part of the page: the values of every arm with their spread, and the ratios with their intervals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pilotage.report import figures
from pilotage.report.figures import Interval
from pilotage.report.text import number


def spread(values: Any) -> dict[str, Any] | None:
    """Median, smallest and largest of the repetitions, or None when there are none."""
    listed = values if isinstance(values, Sequence) and not isinstance(values, str) else [values]
    found = [value for value in (number(value) for value in listed) if value is not None]
    if not found:
        return None
    return {"median": statistics.median(found), "low": min(found), "high": max(found), "n": len(found)}


def load_tables(bench: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One table a load: a row a metric, a column an arm; arms that did not measure it have None."""
    arms: Mapping[str, Any] = {name: arm for name, arm in (bench.get("arms") or {}).items() if isinstance(arm, Mapping)}
    loads = list(dict.fromkeys(load for arm in arms.values() for load in arm if isinstance(arm[load], Mapping)))
    tables = []
    for load in loads:
        metrics = list(dict.fromkeys(metric for arm in arms.values() for metric in arm.get(load) or {}))
        rows = [
            {"metric": metric, "cells": [spread((arm.get(load) or {}).get(metric)) for arm in arms.values()]}
            for metric in metrics
        ]
        tables.append({"load": load, "arms": list(arms), "rows": [row for row in rows if any(row["cells"])]})
    return [table for table in tables if table["rows"]]


def ratio_rows(ratios: Sequence[Mapping[str, Any]], *, width: float = 220) -> list[dict[str, Any]]:
    """The ratios on one shared axis, so that they can be compared by eye. A ratio above 1 means that we are better."""
    usable = [row for row in ratios if (number(row.get("ratio")) or 0) > 0]
    if not usable:
        return []
    intervals = [
        Interval(value=float(row["ratio"]), low=number(row.get("low")), high=number(row.get("high"))) for row in usable
    ]
    scale = figures.ratio_scale(intervals)
    return [
        {**row, "figure": figures.ratio_bar(drawn, scale=scale, css="target", width=width)}
        for row, drawn in zip(usable, intervals, strict=True)
    ]


def time_rows(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where the time goes, each part with a bar of its share."""
    return [{**part, "figure": figures.bar(number(part.get("share")) or 0.0, css="target")} for part in parts]
