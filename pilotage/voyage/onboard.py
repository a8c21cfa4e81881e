"""Sail: run the legs in order, keep what is still valid, record what happened, and rebuild the report."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from pilotage.core.nouns import Status, worst
from pilotage.report import page
from pilotage.report.record import EXTRAS, STAGES, StageRecord, stage
from pilotage.voyage import fingerprint, judge, process
from pilotage.voyage.course import Leg
from pilotage.voyage.rundir import RunDir


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """How a voyage ended.

    Attributes:
        status: the worst of all stages.
        records: one record a stage, in order; `kept` names those that an earlier run had made.
        report: the page.
    """

    status: Status
    records: list[StageRecord]
    kept: frozenset[str]
    report: Path


@dataclass(frozen=True, kw_only=True)
class Watcher:
    """What the command line wants to hear of: a stage begins, goes on, or has ended."""

    begins: Callable[[str], None] = lambda name: None
    ticks: Callable[[str, str], None] = lambda name, line: None
    ended: Callable[[StageRecord, bool], None] = lambda record, kept: None


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def machine() -> dict[str, Any]:
    """What the numbers of this run were measured on."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": f"{memory / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def sail(
    run: RunDir,
    legs: Sequence[Leg],
    voyage: Mapping[str, Any],
    *,
    skip: Sequence[str] = (),
    redo: Sequence[str] = (),
    watcher: Watcher | None = None,
) -> Arrival:
    """Run `legs` in `run`, which is prepared and locked.

    Completed stages whose fingerprint is unchanged are kept. Records that no longer fit are removed before anything
    runs, so that an interruption leaves no stale result. A stage that crashes is recorded as not measured, and the
    stages that need it are not run.

    Args:
        run: the run directory.
        legs: the stages as planned; stages that are not among them are recorded as not measured.
        voyage: what voyage.json says; must hold "model" and "fingerprint" (the checkpoint's digest).
        skip: stages not to run, on the user's word; redo: stages to run although their record would be kept.
        watcher: told what happens.

    Raises:
        StorageError: the run directory is full or cannot be written.
    """
    watcher = watcher or Watcher()
    run.sweep()
    digests = {
        leg.stage: fingerprint.stage(leg.stage, checkpoint_digest=str(voyage["fingerprint"]), options=leg.depends)
        for leg in legs
    }
    kept: dict[str, StageRecord] = {}
    for found in (*STAGES, *EXTRAS):
        record = run.kept(found.name, digests[found.name]) if found.name in digests else None
        if record is None or found.name in redo or found.name in skip:
            run.drop(found.name)
        else:
            kept[found.name] = record
    run.write_voyage(voyage)

    records: dict[str, StageRecord] = {}
    for group in _groups(legs):
        due = [leg for leg in group if leg.stage not in kept]

        def sail_one(leg: Leg, stop: threading.Event) -> StageRecord:
            record = _run_leg(run, leg, digests[leg.stage], records, skip=skip, watcher=watcher, stop=stop)
            run.write(record)
            return record

        made = _together(due, sail_one)
        for leg in group:
            records[leg.stage] = kept[leg.stage] if leg.stage in kept else made[leg.stage]
            watcher.ended(records[leg.stage], leg.stage in kept)
        # After every stage, so that an interrupted voyage has a report too. A page that cannot be drawn must not end a
        # voyage of minutes; the last one, below, says why it cannot.
        with contextlib.suppress(jinja2.TemplateError, TypeError, ValueError, KeyError):
            page.build(run.path)
    for found in STAGES:
        if found.name not in records:
            record = _not_run(found.name, "the model package has to be written first")
            run.write(record)
            records[found.name] = record
    report = page.build(run.path)
    known = [found for found in (*STAGES, *EXTRAS) if found.name in records]
    ordered = [records[found.name] for found in sorted(known, key=lambda found: found.number)]
    return Arrival(
        status=worst([record.status for record in ordered]), records=ordered, kept=frozenset(kept), report=report
    )


def _groups(legs: Sequence[Leg]) -> list[list[Leg]]:
    """Neighbouring light legs share a group and run side by side; every other leg is a group of its own."""
    groups: list[list[Leg]] = []
    for leg in legs:
        if leg.light and groups and groups[-1][-1].light:
            groups[-1].append(leg)
        else:
            groups.append([leg])
    return groups


def _together(legs: Sequence[Leg], sail_one: Callable[[Leg, threading.Event], StageRecord]) -> dict[str, StageRecord]:
    """Run legs side by side, one a core; when one raises, or we are interrupted, the others are ended first."""
    stop = threading.Event()
    if len(legs) < 2:
        return {leg.stage: sail_one(leg, stop) for leg in legs}
    with ThreadPoolExecutor(min(len(legs), os.cpu_count() or 1)) as pool:
        futures = {leg.stage: pool.submit(sail_one, leg, stop) for leg in legs}
        try:
            # In small steps: an interruption must reach this thread.
            while not wait(futures.values(), timeout=0.2, return_when=FIRST_EXCEPTION).done >= set(futures.values()):
                if any(future.done() and future.exception() is not None for future in futures.values()):
                    break
            raised = [future.exception() for future in futures.values() if future.done()]
            for error in raised:
                if error is not None:
                    raise error
            return {name: future.result() for name, future in futures.items()}
        except BaseException:
            stop.set()
            for future in futures.values():
                future.cancel()
            raise


def _not_run(name: str, reason: str, *, command: str = "") -> StageRecord:
    return StageRecord(
        stage=name,
        status=Status.NOT_MEASURED,
        summary="not run",
        reason=reason,
        completed=False,
        started=now(),
        command=command,
    )


def _run_leg(
    run: RunDir,
    leg: Leg,
    digest: str,
    done: Mapping[str, StageRecord],
    *,
    skip: Sequence[str],
    watcher: Watcher,
    stop: threading.Event,
) -> StageRecord:
    if leg.stage in skip:
        return _not_run(leg.stage, f"left out by --skip {leg.stage}", command=leg.shown)
    # A stage that was left out on the user's word does not stop those after it; one that broke does.
    broken = [name for name in leg.needs if name in done and not done[name].completed and name not in skip]
    if broken:
        needed = stage(broken[0]).title.lower()
        return _not_run(leg.stage, f"needs the {needed} stage, which did not complete", command=leg.shown)
    watcher.begins(leg.stage)
    started = now()
    if leg.result is not None:
        status, summary, reason = judge.judge(leg.stage, leg.result, 0)
        return StageRecord(
            stage=leg.stage,
            status=status,
            summary=summary,
            reason=reason,
            fingerprint=digest,
            started=started,
            result=leg.result,
        )
    run.check_space()
    log = run.log(leg.stage)
    outcome = process.run(leg.command, log=log, tick=lambda line: watcher.ticks(leg.stage, line), stop=stop)
    common: dict[str, Any] = {
        "stage": leg.stage,
        "fingerprint": digest,
        "started": started,
        "seconds": round(outcome.seconds, 3),
        "command": leg.shown,
        "exit_code": outcome.exit_code,
        "log": str(log.relative_to(run.path)),
    }
    if outcome.result is None:
        return StageRecord(
            status=Status.NOT_MEASURED, summary="did not complete", reason=outcome.error, completed=False, **common
        )
    status, summary, reason = judge.judge(leg.stage, outcome.result, outcome.exit_code)
    return StageRecord(status=status, summary=summary, reason=reason, result=outcome.result, **common)
