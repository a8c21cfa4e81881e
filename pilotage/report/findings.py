"""The parts of the page about finding a fault: where it is, under which condition, in which head, on which task.

Everything comes from the JSON of `pilotage localise`, `pilotage invariance` and `pilotage validate`; what a command did
not measure is left out, and said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from pilotage.core.nouns import Status, worst
from pilotage.report import maps
from pilotage.report.accuracy import verdict_row
from pilotage.report.text import number, status_of

MAX_BROKEN = 40
MAX_MAPS = 4


def _list(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list | tuple) else []


def tasks_view(tasks: Any) -> dict[str, Any] | None:
    """The table of tasks, a row a metric: both scores, their paired difference with its interval, and the test.

    The status of a task stands at its first metric, which is the one that decides.
    """
    found = _list(tasks)
    if not found:
        return None
    rows: list[dict[str, Any]] = []
    for task in found:
        metrics = task.get("metrics")
        measured = metrics if isinstance(metrics, Mapping) else {}
        status = status_of(task.get("status"))
        common = {"task": task.get("task"), "status": status}
        verdicts = [verdict_row(verdict) for verdict in _list(task.get("verdicts"))]
        if not measured:
            reasons = [str(verdict.get("bound_source")) for verdict in verdicts if verdict.get("bound_source")]
            rows.append({**common, "decides": True, "reason": "; ".join(reasons), "verdicts": verdicts, "figure": ""})
        for index, (metric, paired) in enumerate(measured.items()):
            if isinstance(paired, Mapping):
                own = {**common, "metric": metric, "decides": index == 0, "verdicts": verdicts if index == 0 else []}
                rows.append({**own, **paired, "figure": _difference_figure(paired, status)})
    return {"rows": rows, "status": worst([status_of(task.get("status")) for task in found])}


def _difference_figure(paired: Mapping[str, Any], status: Status) -> Markup | str:
    difference, interval = number(paired.get("difference")), paired.get("interval")
    if difference is None:
        return ""
    ends = [number(end) for end in interval] if isinstance(interval, list | tuple) else []
    low, high = ends if len(ends) == 2 else (None, None)
    css = {Status.PASS: "pass", Status.FAIL: "fail", Status.NOT_MEASURED: "none"}[status]
    return maps.difference_bar(difference, low, high, css=css, width=160)


def kv_views(arms: Any) -> list[dict[str, Any]]:
    """For each arm with a KV comparison: maps by layer and head and by layer and position, and its verdicts."""
    views = []
    for arm in _list(arms):
        kv = arm.get("kv")
        if not isinstance(kv, Mapping) or not _list(kv.get("layers")):
            continue
        layers = _list(kv.get("layers"))
        verdicts = _list(kv.get("verdicts"))
        bound = _kv_bound(verdicts)
        by_head, by_position = [], []
        for kind, word in (("k", "keys"), ("v", "values")):
            chosen = [layer for layer in layers if layer.get("kind") == kind]
            if not chosen:
                continue
            rows = [
                maps.Row(label=str(layer.get("layer")), values=[_over(x, bound) for x in layer.get("heads") or []])
                for layer in chosen
            ]
            heads = max((len(row.values) for row in rows), default=0)
            columns = (
                [((h + 0.5) / heads, f"head {h}") for h in range(heads)]
                if heads <= 4
                else [(0, "head 0"), (1, f"head {heads - 1}")]
            )
            by_head.append(maps.heat_map(rows, title=f"{word}, by head", columns=columns, width=330, label_width=130))
            by_position.append(_kv_positions(chosen, bound, word))
        unsure = [layer for layer in layers if layer.get("bhattacharyya_says") not in (None, _layer_says(layer, bound))]
        views.append(
            {
                "arm": arm.get("arm"),
                "bound": bound,
                "heads": by_head,
                "positions": [figure for figure in by_position if figure],
                "verdicts": [verdict_row(verdict, context=str(arm.get("arm", ""))) for verdict in verdicts],
                "bhattacharyya": min(
                    (x for layer in layers if (x := number(layer.get("bhattacharyya"))) is not None), default=None
                ),
                "disagree": [f"{layer.get('layer')} {layer.get('kind')}" for layer in unsure],
                "status": worst([status_of(verdict.get("status")) for verdict in verdicts]),
            }
        )
    return views


def _kv_bound(verdicts: Sequence[Mapping[str, Any]]) -> float:
    """The bound of the ratios that the verdicts hold against a bound; 1.3 says "unlike the baseline" without one."""
    bounds = [b for v in verdicts if "ratio" in str(v.get("metric")) and (b := number(v.get("bound"))) is not None]
    return max(bounds) if bounds else 1.3


def _over(value: Any, bound: float) -> float | None:
    found = number(value)
    return None if found is None else found / bound


def _layer_says(layer: Mapping[str, Any], bound: float) -> str:
    ratio = number(layer.get("ratio"))
    return "pass" if ratio is not None and ratio <= bound else "fail"


def _kv_positions(layers: Sequence[Mapping[str, Any]], bound: float, word: str) -> Markup | None:
    """All streams of a layer in one row, one after another."""
    rows, columns = [], []
    for layer in layers:
        streams = _list(layer.get("by_position"))
        rows.append(
            maps.Row(
                label=str(layer.get("layer")),
                values=[_over(value, bound) for stream in streams for value in stream.get("ratio") or []],
            )
        )
        columns = _stream_columns(streams, "ratio")
    if not any(row.values for row in rows):
        return None
    return maps.heat_map(rows, title=f"{word}, by position", columns=columns, width=700, label_width=130)


def _stream_columns(streams: Sequence[Mapping[str, Any]], values: str, name: str = "stream") -> list[tuple[float, str]]:
    total = sum(len(stream.get(values) or []) for stream in streams) or 1
    columns, at = [], 0
    for stream in streams:
        label = stream.get(name, stream.get("request"))
        columns.append((at / total if at else 0.0, f"{label}"))
        at += len(stream.get(values) or [])
    return columns


def localise_view(result: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Culprits with their evidence, and for each arm the map of sites by position and the errors through depth."""
    if result is None:
        return None
    culprits = _list(result.get("culprits"))
    keys = {str(culprit.get("key") or f"{culprit.get('module')}.{culprit.get('site')}") for culprit in culprits}
    arms = []
    for arm in _list(result.get("arms")):
        sites = _list(arm.get("sites"))
        names = [str(site.get("site")) for site in sites]
        depth = _list(arm.get("depth"))
        growth = Markup("")
        if depth:
            growth = maps.depth_panel(
                [str(row.get("site")) for row in depth],
                {
                    "baseline": [number(row.get("control")) for row in depth],
                    "target": [number(row.get("target")) for row in depth],
                },
                title="relative error with nothing handed onward, by depth",
                culprits=_around(keys, [str(row.get("site")) for row in depth]),
            )
        arms.append(
            {
                "arm": arm.get("arm"),
                "target": arm.get("target"),
                "not_measured": arm.get("not_measured"),
                "causal": arm.get("causal"),
                "n": len(sites),
                "failing": sum(status_of(site.get("status")) is Status.FAIL for site in sites),
                "map": _site_map(sites, keys),
                "growth": growth,
                "local": maps.depth_panel(
                    names,
                    {"target": [number(site.get("score")) for site in sites]},
                    title="own error of each site over its bound, by depth",
                    culprits=sorted(keys),
                ),
            }
        )
    return {
        "status": status_of(result.get("status")),
        "culprits": [{**culprit, "evidence": culprit.get("evidence") or {}} for culprit in culprits],
        "causal": result.get("causal"),
        "arms": arms,
        "reference": result.get("reference"),
    }


def _around(culprits: set[str], stream: Sequence[str]) -> list[str]:
    """The places of the residual stream that culprits are at or inside of."""
    return [site for site in stream if any(key == site or key.startswith(f"{site}.") for key in culprits)]


def _site_map(sites: Sequence[Mapping[str, Any]], culprits: set[str]) -> Markup | None:
    """Sites by position, where the command wrote positions; else one cell a site."""
    rows, columns = [], [(0.0, "score over its bound")]
    for site in sites:
        streams = _list(site.get("by_position"))
        if streams:
            values = [number(value) for stream in streams for value in stream.get("row") or []]
            columns = _stream_columns(streams, "row", "request")
        else:
            values = [number(site.get("score"))]
        name = str(site.get("site"))
        rows.append(maps.Row(label=name, values=values, marked=name in culprits))
    if not rows:
        return None
    positioned = any(site.get("by_position") for site in sites)
    if positioned:
        columns = [(share, f"request {text}") for share, text in columns]
    title = "worst row of each site by position, over its bound" if positioned else "score of each site, over its bound"
    return maps.heat_map(rows, title=title, columns=columns, width=900, label_width=230)


def invariance_view(result: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The matrix of relations and engines, what broke, and the noise that the bounds come from."""
    if result is None:
        return None
    relations = _list(result.get("relations"))
    engines = list(dict.fromkeys(str(row.get("engine")) for row in relations))
    matrix = []
    for relation in dict.fromkeys(str(row.get("relation")) for row in relations):
        same = [row for row in relations if row.get("relation") == relation]
        cells = []
        for engine in engines:
            here = [row for row in same if row.get("engine") == engine]
            verdicts = [
                v for row in here for v in _list(row.get("verdicts")) if v.get("metric") in ("bitwise", "bounded")
            ]
            cells.append(
                {
                    "status": worst([status_of(row.get("status")) for row in here]),
                    "conditions": len(here),
                    "bitwise": sum(int(number(v.get("n")) or 0) for v in verdicts if v.get("metric") == "bitwise"),
                    "bounded": sum(int(number(v.get("n")) or 0) for v in verdicts if v.get("metric") == "bounded"),
                    "worst": max((x for row in here if (x := number(row.get("worst"))) is not None), default=None),
                    "reason": next((row.get("reason") for row in here if row.get("reason")), ""),
                }
                if here
                else None
            )
        matrix.append({"relation": relation, "cells": cells})
    broken = []
    for row in relations:
        if status_of(row.get("status")) is Status.FAIL:
            for at in _list(row.get("broke")) or [{}]:
                broken.append({**{k: row.get(k) for k in ("relation", "engine", "condition")}, **at})
    told = result.get("noise")
    noise: Mapping[str, Any] = told if isinstance(told, Mapping) else {}
    return {
        "status": status_of(result.get("status")),
        "engines": engines,
        "matrix": matrix,
        "broken": broken[:MAX_BROKEN],
        "n_broken": len(broken),
        "noise": [{"dtype": dtype, **dict(found)} for dtype, found in noise.items() if isinstance(found, Mapping)],
        "conditions": [
            {
                **{k: row.get(k) for k in ("relation", "engine", "condition", "worst", "expects", "reason")},
                "status": status_of(row.get("status")),
            }
            for row in relations
        ],
    }
