"""Render the records of a run directory as one HTML page that asks the network for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import ChainableUndefined, Environment, PackageLoader
from markupsafe import Markup

import pilotage
from pilotage.core import store
from pilotage.core.errors import StorageError
from pilotage.core.nouns import Status
from pilotage.report import accuracy, benchmark, figures, findings, headline, maps, receipt, text
from pilotage.report.record import EXTRAS, REPORT_FILE, STAGES, Records, read

MAX_BYTES = 5_000_000
MAX_ROWS = 400  # rows of one table; the JSON beside the page holds the rest


@cache
def environment() -> Environment:
    """The templates, with the filters that they use."""
    # Autoescape is on for everything: model names, prompts and generated texts are not ours.
    made = Environment(
        loader=PackageLoader("pilotage.report"),
        autoescape=True,
        undefined=ChainableUndefined,  # a stage may leave out what it did not measure; it is then shown as a dash
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        num=text.num,
        seconds=text.seconds,
        size=text.size,
        interval=text.interval,
        plain=text.plain,
        visible=text.visible,
    )
    made.globals.update(words=text.WORDS, signs=text.SIGNS, Status=Status, bar=figures.bar, max_rows=MAX_ROWS)
    return made


def stylesheet() -> Markup:
    """The style of every page, inline: a page opens from anywhere."""
    source = (Path(__file__).parent / "templates" / "report.css").read_text()
    return Markup(source)


def _validate_view(result: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if result is None:
        return None
    return {
        "reference": result.get("reference"),
        "verdicts": [accuracy.verdict_row(verdict) for verdict in result.get("verdicts") or []],
        "arms": [accuracy.arm_view(arm) for arm in result.get("arms") or []],
        "modules": accuracy.module_rows(result.get("modules") or []),
        "module_summary": accuracy.module_summary(result.get("modules") or []),
    }


def _tasks_view(records: Records) -> dict[str, Any] | None:
    """Tasks that were run as a check of their own, or as level 1 of the validation."""
    for name in ("tasks", "validate"):
        found = findings.tasks_view((records.result(name) or {}).get("tasks"))
        if found is not None:
            return found
    return None


def _smoke_view(result: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if result is None:
        return None
    buckets = result.get("buckets") or []
    slowest = max((text.number(bucket.get("seconds")) or 0.0 for bucket in buckets), default=0.0) or 1.0
    return {
        "load_s": result.get("load_s"),
        "compile_s": result.get("compile_s"),
        "dtype": result.get("dtype"),
        "buckets": [
            {**bucket, "figure": figures.bar((text.number(bucket.get("seconds")) or 0.0) / slowest, css="target")}
            for bucket in buckets
        ],
        "prompts": result.get("prompts") or [],
        "verdicts": [accuracy.verdict_row(verdict) for verdict in result.get("verdicts") or []],
    }


def _weights_view(result: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if result is None:
        return None
    tensors = result.get("tensors") or []
    return {
        "counts": result.get("counts") or {},
        "round_trip": result.get("round_trip"),
        "tensors": tensors,
        "dropped": [tensor for tensor in tensors if tensor.get("action") == "drop"],
        "parameters": result.get("parameters") or [],
        "verdicts": [accuracy.verdict_row(verdict) for verdict in result.get("verdicts") or []],
        "bytes": sum(text.number(tensor.get("bytes")) or 0.0 for tensor in tensors),
    }


def _bench_view(result: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if result is None:
        return None
    return {
        "arms": list(result.get("arms") or {}),
        "tables": benchmark.load_tables(result),
        "ratios": benchmark.ratio_rows(result.get("ratios") or []),
        "time": benchmark.time_tables(result.get("where_time_goes") or []),
        "loads": result.get("loads") or {},
        "busy": benchmark.busy_note(result.get("machine")),
    }


def _fields(diff: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The config fields of both models in one table: differing ones first, then those of one model only."""
    fields = (diff or {}).get("fields")
    if not isinstance(fields, Mapping):
        return []
    rows = []
    for name, pair in (fields.get("differ") or {}).items():
        if isinstance(pair, list | tuple) and len(pair) == 2:
            rows.append({"field": name, "a": pair[0], "b": pair[1]})
    rows += [{"field": name, "a": value, "b": None} for name, value in (fields.get("only_a") or {}).items()]
    rows += [{"field": name, "a": None, "b": value} for name, value in (fields.get("only_b") or {}).items()]
    return rows


def _glance(records: Records) -> dict[str, Any]:
    """The figures under the verdict: the longest stream of each arm, and the ratios of the benchmark."""
    panels = [accuracy.worst_panel(arm) for arm in (records.result("validate") or {}).get("arms") or []]
    return {
        "panels": [panel for panel in panels if panel is not None][:2],
        "ratios": benchmark.ratio_rows(
            benchmark.chosen((records.result("bench") or {}).get("ratios") or []), width=130
        ),
    }


def _versions(records: Records) -> dict[str, str]:
    merged: dict[str, str] = {str(key): str(value) for key, value in (records.voyage.get("versions") or {}).items()}
    for name in ("validate", "bench"):
        for key, value in ((records.result(name) or {}).get("versions") or {}).items():
            merged.setdefault(str(key), text.plain(value))
    return merged


def _context(records: Records) -> dict[str, Any]:
    cards = headline.stage_cards(records)
    by_name = {card["name"]: card for card in cards}
    diff = records.result("diff")
    return {
        "css": stylesheet(),
        "version": pilotage.__version__,
        "voyage": records.voyage,
        "headline": headline.headline(records),
        "cards": cards,
        "card": by_name,
        "tiles": headline.key_numbers(records),
        "glance": _glance(records),
        "diff": diff,
        "fields": _fields(diff),
        "weights": _weights_view(records.result("weights")),
        "smoke": _smoke_view(records.result("smoke")),
        "validate": _validate_view(records.result("validate")),
        "kv": findings.kv_views((records.result("validate") or {}).get("arms")),
        "tasks": _tasks_view(records),
        "invariance": findings.invariance_view(records.result("invariance")),
        "localise": findings.localise_view(records.result("localise")),
        "heat_legend": maps.legend(),
        "bench": _bench_view(records.result("bench")),
        "receipts": receipt.receipts(records),
        "implement": records.result("implement"),
        "register": records.result("register"),
        "commands": [
            {"title": stage.title, "command": records.stages[stage.name].command}
            for stage in (*STAGES, *EXTRAS)
            if stage.name in records.stages and records.stages[stage.name].command
        ],
        "bench_commands": (records.result("bench") or {}).get("commands") or [],
        "versions": _versions(records),
        "machine": records.voyage.get("machine") or {},
    }


def render(records: Records) -> str:
    """The page for `records` as one string of HTML."""
    return environment().get_template("report.html.j2").render(_context(records))


def build(directory: Path) -> Path:
    """Read the run directory `directory`, write its report and return the path.

    Raises:
        BadInput: the directory holds no voyage.
        StorageError: the page cannot be written, or would be larger than a page should be.
    """
    html = render(read(directory))
    size = len(html.encode())
    if size > MAX_BYTES:
        raise StorageError(f"the report would be {size:,} bytes, more than {MAX_BYTES:,}", where=str(directory))
    path = directory / REPORT_FILE
    store.write_text(path, html)
    return path
