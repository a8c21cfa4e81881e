"""From what a stage printed to its status, one line for the table, and the reason when it is not a pass.

Pure functions of the JSON. A missing or empty part never counts as a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pilotage.core.nouns import Status, worst
from pilotage.report.benchmark import chosen
from pilotage.report.text import num, number, seconds, size, status_of

Judged = tuple[Status, str, str]


def _first_problem(verdicts: list[Mapping[str, Any]]) -> str:
    """The verdict that says most about why this is not a pass, as a sentence without a full stop."""
    for wanted in (Status.FAIL, Status.NOT_MEASURED):
        for verdict in verdicts:
            if status_of(verdict.get("status")) is not wanted:
                continue
            claim = str(verdict.get("claim", "a claim"))
            said = "does not hold" if wanted is Status.FAIL else "could not be judged"
            estimate, bound = number(verdict.get("estimate")), number(verdict.get("bound"))
            numbers = f" ({verdict.get('metric')} {num(estimate)}, bound {num(bound)})" if estimate is not None else ""
            return f"“{claim}” {said}{numbers}"
    return ""


def _from_verdicts(verdicts: list[Mapping[str, Any]]) -> Status:
    return worst([status_of(verdict.get("status")) for verdict in verdicts])


def diff(result: Mapping[str, Any]) -> Judged:
    """A diff is information: it passes when all of its checklist is there."""
    rows = result.get("checklist") or []
    if not rows:
        return Status.NOT_MEASURED, "no checklist", "the diff holds no checklist"
    differing = sum(1 for row in rows if row.get("verdict") == "differs")
    items = result.get("work_items") or []
    summary = f"{differing} of {len(rows)} rows differ, {len(items)} work items"
    return Status.PASS, summary, ""


def implement(result: Mapping[str, Any]) -> Judged:
    architecture = result.get("architecture", "?")
    if result.get("supported"):
        return Status.PASS, f"skipped: {architecture} is supported by {result.get('origin', 'this version')}", ""
    files = result.get("files") or []
    return (
        Status.NOT_MEASURED,
        f"scaffold of {len(files)} files " + ("written" if result.get("written", True) else "left as it was"),
        f"{architecture} has no model package yet; fill in the marked places and register it",
    )


def register(result: Mapping[str, Any]) -> Judged:
    checks = result.get("checks") or []
    wrong = [check for check in checks if not check.get("ok")]
    if not checks:
        return Status.NOT_MEASURED, "nothing checked", "no registration was checked"
    if wrong:
        return Status.FAIL, f"{len(wrong)} of {len(checks)} checks failed", f"{wrong[0]['claim']}: {wrong[0]['found']}"
    return Status.PASS, f"{len(checks)} checks; vLLM finds platform and model", ""


def weights(result: Mapping[str, Any]) -> Judged:
    tensors = result.get("tensors") or []
    verdicts = list(result.get("verdicts") or [])
    status = worst([status_of(result.get("status")), *([_from_verdicts(verdicts)] if verdicts else [])])
    total = sum(number(tensor.get("bytes")) or 0.0 for tensor in tensors)
    dropped = sum(1 for tensor in tensors if tensor.get("action") == "drop")
    trip = result.get("round_trip") or {}
    equal = "round trip byte-identical" if status_of(trip.get("status")) is Status.PASS else "round trip not proven"
    summary = f"{num(len(tensors))} tensors, {size(total)}, {dropped} dropped; {equal}"
    if status is Status.PASS and not tensors:
        return Status.NOT_MEASURED, "empty ledger", "the ledger holds no tensor"
    return status, summary, "" if status is Status.PASS else _first_problem(verdicts) or "the ledger does not balance"


def smoke(result: Mapping[str, Any]) -> Judged:
    verdicts = list(result.get("verdicts") or [])
    status = _from_verdicts(verdicts)
    buckets, prompts = result.get("buckets") or [], result.get("prompts") or []
    cached = sum(1 for bucket in buckets if bucket.get("cached"))
    agreeing = sum(1 for prompt in prompts if prompt.get("agrees_with_hf") is True)
    ties = sum(1 for prompt in prompts if prompt.get("agrees_with_hf") == "tie")
    tied = f", {ties} tied" if ties else ""
    summary = (
        f"{len(buckets)} buckets in {seconds(result.get('compile_s'))} ({cached} cached); "
        f"{agreeing} of {len(prompts)} texts equal HF{tied}"
    )
    return status, summary, "" if status is Status.PASS else _first_problem(verdicts) or "no verdict"


def validate(result: Mapping[str, Any]) -> Judged:
    arms = result.get("arms") or []
    verdicts = list(result.get("verdicts") or []) + [v for arm in arms for v in arm.get("verdicts") or []]
    modules = [module.get("verdict") or {} for module in result.get("modules") or []]
    status = worst([status_of(result.get("status")), *[status_of(arm.get("status")) for arm in arms]])
    parts = []
    for arm in arms:
        ratios = [v for v in arm.get("verdicts") or [] if "ratio" in str(v.get("metric")) and number(v.get("estimate"))]
        if ratios:
            parts.append(f"{arm.get('arm')} error {num(ratios[0]['estimate'])}× HF's")
    passed = sum(1 for verdict in modules if status_of(verdict.get("status")) is Status.PASS)
    parts.append(f"{passed} of {len(modules)} module checks pass")
    if status is Status.PASS and not arms:
        return Status.NOT_MEASURED, "no arm", "no arm was compared"
    reason = "" if status is Status.PASS else _first_problem([*verdicts, *modules]) or "no verdict"
    return status, "; ".join(parts), reason


def bench(result: Mapping[str, Any]) -> Judged:
    """A benchmark passes when it measured us and something to compare with; how fast is for the reader to judge."""
    ratios = [row for row in result.get("ratios") or [] if number(row.get("ratio")) is not None]
    arms = result.get("arms") or {}
    if "pilotage" not in arms:
        return Status.NOT_MEASURED, "pilotage was not measured", "the benchmark holds no measurement of pilotage"
    if not ratios:
        return Status.NOT_MEASURED, "no ratio", "nothing to compare with was measured in the same run"
    shown = [f"{row.get('load')} {num(row['ratio'])}× {row.get('against')}" for row in chosen(ratios)]
    return Status.PASS, ", ".join(shown), ""


def tasks(result: Mapping[str, Any]) -> Judged:
    found = result.get("tasks") or []
    status = worst([status_of(task.get("status")) for task in found])
    failed = [str(task.get("task")) for task in found if status_of(task.get("status")) is Status.FAIL]
    missing = [str(task.get("task")) for task in found if status_of(task.get("status")) is Status.NOT_MEASURED]
    reason = f"{', '.join(failed)} scores otherwise than Hugging Face" if failed else ""
    reason = reason or (f"{', '.join(missing)} could not be judged" if missing else "" if found else "no task was run")
    return status, f"{len(found)} tasks", reason


def invariance(result: Mapping[str, Any]) -> Judged:
    """Relations about what the target does not have are listed by the command and not counted."""
    relations = [row for row in result.get("relations") or [] if row.get("counted", True)]
    status = worst([status_of(row.get("status")) for row in relations])
    broken = [row for row in relations if status_of(row.get("status")) is Status.FAIL]
    names = list(dict.fromkeys(str(row.get("relation")) for row in relations))
    summary = f"{len(relations)} conditions of {len(names)} relations"
    if broken:
        first = broken[0]
        at = (first.get("broke") or [{}])[0]
        where = f", prompt {at.get('prompt')!r} from position {at.get('position')}" if at else ""
        reason = f"{first.get('relation')} ({first.get('condition')}; {first.get('engine')}) does not hold{where}"
        return status, f"{summary}, {len(broken)} broken", reason
    missing = [row for row in relations if status_of(row.get("status")) is Status.NOT_MEASURED]
    reason = f"{missing[0].get('relation')}: {missing[0].get('reason')}" if missing else ""
    return status, summary, reason or ("" if relations else "no condition was run")


def localise(result: Mapping[str, Any]) -> Judged:
    culprits = result.get("culprits") or []
    status = status_of(result.get("status"))
    sites = sum(len(arm.get("sites") or []) for arm in result.get("arms") or [])
    if culprits:
        names = ", ".join(f"{c.get('module')} ({c.get('site')})" for c in culprits[:3])
        return Status.FAIL, f"{len(culprits)} culprits of {sites} sites", f"at fault: {names}"
    if status is Status.PASS and not sites:
        return Status.NOT_MEASURED, "no site", "no site was scored"
    return status, f"no culprit among {sites} sites", "" if status is Status.PASS else "not every arm could be measured"


_JUDGES: Mapping[str, Callable[[Mapping[str, Any]], Judged]] = {
    "diff": diff,
    "implement": implement,
    "register": register,
    "weights": weights,
    "smoke": smoke,
    "validate": validate,
    "bench": bench,
    "tasks": tasks,
    "invariance": invariance,
    "localise": localise,
}


def judge(stage: str, result: Mapping[str, Any], exit_code: int) -> Judged:
    """Judge a stage by its JSON and its exit code; where they disagree the worse of the two counts."""
    status, summary, reason = _JUDGES[stage](result)
    by_code = {0: Status.PASS, 1: Status.FAIL}.get(exit_code, Status.NOT_MEASURED)
    combined = worst([status, by_code])
    if combined is not status:
        reason = reason or f"its command left with exit code {exit_code}"
    return combined, summary, reason
