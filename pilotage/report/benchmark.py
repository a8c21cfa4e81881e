"""The benchmark part of the page: the values of every arm with their spread, and the ratios with their intervals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pilotage.report import figures
from pilotage.report.figures import Interval
from pilotage.report.text import number

# Known metrics in a reader's words, with their unit and the direction that is better.
LABELS: Mapping[str, str] = {
    "decode_tok_s": "decode, tokens/s ↑",
    "output_tok_s": "output, tokens/s ↑",
    "ttft_ms": "time to first token, ms ↓",
    "itl_ms": "inter-token latency, ms ↓",
    "peak_rss_mib": "peak memory, MiB ↓",
    "seconds": "start, s ↓",
}
# The one metric that stands for a load at the top of the page.
_HEADLINE = ("decode_tok_s", "ttft_ms", "output_tok_s")


def label(metric: Any) -> str:
    """A metric's name for readers; an unknown one keeps its own."""
    return LABELS.get(str(metric), str(metric))


def spread(values: Any) -> dict[str, Any] | None:
    """Median, smallest and largest of the repetitions, or None when there are none."""
    listed = values if isinstance(values, Sequence) and not isinstance(values, str) else [values]
    found = [value for value in (number(value) for value in listed) if value is not None]
    if not found:
        return None
    return {"median": statistics.median(found), "low": min(found), "high": max(found), "n": len(found)}


def load_tables(bench: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One part of the table a load: a row a metric, a cell an arm; arms that did not measure it have None."""
    arms: Mapping[str, Any] = {name: arm for name, arm in (bench.get("arms") or {}).items() if isinstance(arm, Mapping)}
    loads = list(dict.fromkeys(load for arm in arms.values() for load in arm if isinstance(arm[load], Mapping)))
    tables = []
    for load in loads:
        metrics = list(dict.fromkeys(metric for arm in arms.values() for metric in arm.get(load) or {}))
        rows = [
            {"metric": label(metric), "cells": [spread((arm.get(load) or {}).get(metric)) for arm in arms.values()]}
            for metric in metrics
        ]
        tables.append({"load": load, "rows": [row for row in rows if any(row["cells"])]})
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
        {
            **row,
            "metric": label(row.get("metric")),
            "figure": figures.ratio_bar(drawn, scale=scale, css="target", width=width),
        }
        for row, drawn in zip(usable, intervals, strict=True)
    ]


def chosen(ratios: Sequence[Mapping[str, Any]], limit: int = 6) -> list[Mapping[str, Any]]:
    """For the top of the page: of each load and opponent the metric that stands for the load."""
    best: dict[tuple[Any, Any], Mapping[str, Any]] = {}
    for row in ratios:
        load = str(row.get("load"))
        if load in ("memory", "start"):
            continue
        wanted = (
            "ttft_ms"
            if load.startswith("prefill")
            else next(
                (name for name in _HEADLINE if any(r.get("load") == load and r.get("metric") == name for r in ratios)),
                None,
            )
        )
        key = (load, row.get("against"))
        if row.get("metric") == wanted or key not in best:
            best[key] = row
    return list(best.values())[:limit]


def time_tables(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where the time of a step goes: a table a load, each part with a bar of its share."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for part in parts:
        figure = figures.bar(number(part.get("share")) or 0.0, css="target")
        tables.setdefault(str(part.get("load", "")), []).append({**part, "figure": figure})
    return [{"load": load, "rows": rows} for load, rows in tables.items()]


def busy_note(machine: Any) -> str:
    """A warning when other programs kept the machine busy while it was measured; empty otherwise."""
    if not isinstance(machine, Mapping):
        return ""
    load, cores = number(machine.get("load_average")), number(machine.get("cores"))
    if load is None or not cores or load <= 1.5 * cores:
        return ""
    return f"The machine was busy with other work (load average {load:.1f} on {cores:.0f} cores): expect wide spreads."
