"""Two runs side by side: what a fix changed, and what it did not.

Rows are matched by name (a stage, a claim, a relation, a culprit, a load), and a row that one run does not have says so
instead of standing for 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pilotage.core import store
from pilotage.core.errors import StorageError
from pilotage.core.nouns import Status
from pilotage.report import headline
from pilotage.report.record import EXTRAS, STAGES, Records, read
from pilotage.report.text import number, status_of

COMPARE_FILE = "compare.html"
BETTER, WORSE, SAME, OTHER = "better", "worse", "same", "changed"
_RANK = {Status.FAIL: 0, Status.NOT_MEASURED: 1, Status.PASS: 2}
# A benchmark repeats itself to a few percent.
NOISE = 0.05


@dataclass(frozen=True, kw_only=True)
class Line:
    """One comparison.

    Attributes:
        part: which part of the runs it is from.
        name: what is compared.
        a, b: status of either run; None where there is none.
        value_a, value_b: the numbers behind them.
        change: better, worse, same or changed (neither).
        note: more, in words.
    """

    part: str
    name: str
    a: str | None = None
    b: str | None = None
    value_a: Any = None
    value_b: Any = None
    change: str = SAME
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two run directories and their lines.

    Attributes:
        runs: for each of the two {"path", "model", "started", "status", "word", "sentence", "command"}.
        lines: in the order of the report.
    """

    runs: tuple[dict[str, Any], dict[str, Any]]
    lines: list[Line]

    @property
    def worse(self) -> list[Line]:
        """What the second run fails at and the first did not; speed, which repeats to a few percent, is for people."""
        return [line for line in self.lines if line.change == WORSE and line.part != "benchmark"]

    def to_json(self) -> dict[str, Any]:
        return {
            "runs": list(self.runs),
            "lines": [asdict(line) for line in self.lines],
            "better": sum(line.change == BETTER for line in self.lines),
            "worse": len(self.worse),
        }


def compare(a: Path, b: Path) -> Comparison:
    """Compare two run directories.

    Raises:
        BadInput: one of them is none.
    """
    first, second = read(a), read(b)
    lines = [
        *_stages(first, second),
        *_settings(first, second),
        *_verdicts(first, second),
        *_tasks(first, second),
        *_invariance(first, second),
        *_culprits(first, second),
        *_bench(first, second),
    ]
    return Comparison(runs=(_run(a, first), _run(b, second)), lines=lines)


def _run(path: Path, records: Records) -> dict[str, Any]:
    said = headline.headline(records)
    voyage = records.voyage
    return {
        "path": str(path),
        "model": voyage.get("model"),
        "checkpoint": voyage.get("checkpoint"),
        "fingerprint": voyage.get("fingerprint"),
        "started": voyage.get("started"),
        "command": voyage.get("command"),
        "status": said["status"].value,
        "word": said["word"],
        "sentence": said["sentence"],
    }


def _by_status(a: Status | None, b: Status | None) -> str:
    if a is b:
        return SAME
    if a is None or b is None:
        return OTHER
    return BETTER if _RANK[b] > _RANK[a] else WORSE


def _stages(a: Records, b: Records) -> Iterator[Line]:
    for stage in sorted((*STAGES, *EXTRAS), key=lambda found: found.number):
        x, y = a.stages.get(stage.name), b.stages.get(stage.name)
        if x is None and y is None:
            continue
        yield Line(
            part="stages",
            name=f"{stage.number} {stage.title}",
            a=x.status.value if x else None,
            b=y.status.value if y else None,
            change=_by_status(x.status if x else None, y.status if y else None),
            note=(y.reason or y.summary) if y else "",
        )


def _settings(a: Records, b: Records) -> Iterator[Line]:
    """What is not the same about the two runs themselves: checkpoint, versions, machine, environment."""
    for field in ("model", "fingerprint", "target"):
        x, y = a.voyage.get(field), b.voyage.get(field)
        if x != y:
            yield Line(part="runs", name=field, value_a=x, value_b=y, change=OTHER)
    for group in ("versions", "machine", "environment"):
        x, y = a.voyage.get(group) or {}, b.voyage.get(group) or {}
        for name in sorted({*x, *y}):
            if x.get(name) != y.get(name):
                yield Line(part="runs", name=f"{group}: {name}", value_a=x.get(name), value_b=y.get(name), change=OTHER)


def _claims(result: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for verdict in (result or {}).get("verdicts") or []:
        found[str(verdict.get("claim"))] = verdict
    for arm in (result or {}).get("arms") or []:
        kv = (arm.get("kv") or {}).get("verdicts") or []
        for verdict in [*(arm.get("verdicts") or []), *kv]:
            found[str(verdict.get("claim"))] = verdict
    for module in (result or {}).get("modules") or []:
        name = f"{module.get('module')} ({module.get('dtype')})"
        found[name] = module.get("verdict") or {}
    return found


def _verdicts(a: Records, b: Records) -> Iterator[Line]:
    """Claims of the validation; module checks that pass in both runs are left out."""
    x, y = _claims(a.result("validate")), _claims(b.result("validate"))
    modules = {
        f"{module.get('module')} ({module.get('dtype')})"
        for records in (a, b)
        for module in (records.result("validate") or {}).get("modules") or []
    }
    for claim in dict.fromkeys([*x, *y]):
        one, other = x.get(claim), y.get(claim)
        statuses = [status_of(v.get("status")) if v is not None else None for v in (one, other)]
        if claim in modules and statuses == [Status.PASS, Status.PASS]:
            continue
        values = [number(v.get("estimate")) if v is not None else None for v in (one, other)]
        yield Line(
            part="validation",
            name=claim,
            a=statuses[0].value if statuses[0] else None,
            b=statuses[1].value if statuses[1] else None,
            value_a=values[0],
            value_b=values[1],
            change=_by_status(*statuses),
            note=str((other or one or {}).get("metric") or "").replace("_", " "),
        )


def _named(records: Records, name: str, key: str, field: str) -> dict[str, Mapping[str, Any]]:
    return {str(row.get(key)): row for row in (records.result(name) or {}).get(field) or []}


def _tasks(a: Records, b: Records) -> Iterator[Line]:
    def tasks(records: Records) -> dict[str, Mapping[str, Any]]:
        return _named(records, "tasks", "task", "tasks") or _named(records, "validate", "task", "tasks")

    x, y = tasks(a), tasks(b)
    for name in dict.fromkeys([*x, *y]):
        one, other = x.get(name), y.get(name)
        statuses = [status_of(row.get("status")) if row is not None else None for row in (one, other)]
        yield Line(
            part="tasks",
            name=name,
            a=statuses[0].value if statuses[0] else None,
            b=statuses[1].value if statuses[1] else None,
            value_a=_difference(one),
            value_b=_difference(other),
            change=_by_status(*statuses),
            note="paired difference to Hugging Face",
        )


def _difference(task: Mapping[str, Any] | None) -> float | None:
    """The paired difference of the metric that decides, which is the first."""
    metrics: Mapping[str, Any] = (task or {}).get("metrics") or {}
    first = next(iter(metrics.values()), None)
    return number(first.get("difference")) if isinstance(first, Mapping) else None


def _invariance(a: Records, b: Records) -> Iterator[Line]:
    def matrix(records: Records) -> dict[str, Status]:
        found = (records.result("invariance") or {}).get("matrix") or {}
        return {f"{relation}; {engine}": status_of(s) for relation, row in found.items() for engine, s in row.items()}

    x, y = matrix(a), matrix(b)
    for name in dict.fromkeys([*x, *y]):
        one, other = x.get(name), y.get(name)
        yield Line(
            part="invariance",
            name=name,
            a=one.value if one else None,
            b=other.value if other else None,
            change=_by_status(one, other),
        )


def _culprits(a: Records, b: Records) -> Iterator[Line]:
    def culprits(records: Records) -> dict[str, Mapping[str, Any]] | None:
        result = records.result("localise")
        if result is None:
            return None
        return {f"{row.get('module')} ({row.get('site')})": row for row in result.get("culprits") or []}

    x, y = culprits(a), culprits(b)
    if x is None and y is None:
        return
    for name in dict.fromkeys([*(x or {}), *(y or {})]):
        before, after = (found is not None and name in found for found in (x, y))
        known = x is not None and y is not None
        yield Line(
            part="culprits",
            name=name,
            a="fail" if before else ("pass" if x is not None else None),
            b="fail" if after else ("pass" if y is not None else None),
            value_a=number((x or {}).get(name, {}).get("score")),
            value_b=number((y or {}).get(name, {}).get("score")),
            change=OTHER if not known else BETTER if before and not after else WORSE if after and not before else SAME,
        )


def _bench(a: Records, b: Records) -> Iterator[Line]:
    """Medians of our own arm; a higher rate or a shorter time is better, within a few percent they are the same."""

    def medians(records: Records) -> dict[str, float]:
        found = {}
        for load, metrics in (((records.result("bench") or {}).get("arms") or {}).get("pilotage") or {}).items():
            for metric, values in metrics.items() if isinstance(metrics, Mapping) else ():
                known = sorted(
                    v for v in map(number, values if isinstance(values, list) else [values]) if v is not None
                )
                if known:
                    found[f"{load}: {metric}"] = known[len(known) // 2]
        return found

    x, y = medians(a), medians(b)
    for name in dict.fromkeys([*x, *y]):
        one, other = x.get(name), y.get(name)
        change = OTHER
        if one and other:
            gain = other / one if name.endswith("tok_s") else one / other
            change = SAME if abs(gain - 1) <= NOISE else BETTER if gain > 1 else WORSE
        yield Line(part="benchmark", name=name, value_a=one, value_b=other, change=change)


def build(comparison: Comparison, path: Path) -> Path:
    """Write the page of a comparison and return its path.

    Raises:
        StorageError: it cannot be written.
    """
    from pilotage.report.page import MAX_BYTES, environment, stylesheet

    parts: dict[str, list[Line]] = {}
    for line in comparison.lines:
        parts.setdefault(line.part, []).append(line)
    statuses = [Status(run["status"]) for run in comparison.runs]
    html = (
        environment()
        .get_template("compare.html.j2")
        .render(css=stylesheet(), runs=comparison.runs, statuses=statuses, parts=parts, status_of=status_of)
    )
    size = len(html.encode())
    if size > MAX_BYTES:
        raise StorageError(f"the page would be {size:,} bytes, more than {MAX_BYTES:,}", where=str(path))
    store.write_text(path, html)
    return path
