"""`pilotage faults`: does the product find, and name, faults that are planted, and stay silent where there is none?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotage.cli._common import Json, print_json

if TYPE_CHECKING:
    from pilotage.accuracy.faults import Report

ORDER = 56


def verb(app: typer.Typer) -> None:
    """Register the command."""

    @app.command(short_help="Plant known faults and count which are found and named.")
    def faults(
        sample: Annotated[
            bool, typer.Option("--sample", help="A fault of every component and a clean run of every model, for CI.")
        ] = False,
        clean: Annotated[int, typer.Option(min=0, help="Number of runs in which nothing is wrong.")] = 200,
        only: Annotated[
            str | None, typer.Option(metavar="PATTERN", help="Only these cases: 'gpt-oss*', '*window*'.")
        ] = None,
        out: Annotated[
            Path | None, typer.Option(metavar="DIR", help="Keep results here. [default: PILOTAGE_HOME/faults]")
        ] = None,
        again: Annotated[bool, typer.Option("--again", help="Measure again what has a kept result.")] = False,
        engine: Annotated[
            bool, typer.Option("--engine", help="Plant them under the real vLLM engine; only asks which are found.")
        ] = False,
        page: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table as Markdown.")] = None,
        json: Json = False,
    ) -> None:
        """Plant known faults in tiny models, one at a time, and see what finds them.

        Each is judged by the gates of `validate` and named by `localise`; clean runs over seeds and kernels must raise
        no alarm. The rules that other projects use are asked about the same logits. A run that was stopped goes on
        where it was.

        Exits with 0 if every fault that fp32 can see is found, 95% of the found ones are named first and no clean run
        alarms; with 1 otherwise.
        """
        from pilotage.accuracy.faults import cases
        from pilotage.accuracy.faults import page as pages
        from pilotage.accuracy.faults import run as faults_run
        from pilotage.accuracy.faults.table import FAULTS
        from pilotage.core import store
        from pilotage.core.nouns import Status

        where = out if out is not None else store.home() / "faults"
        planted, runs = cases.sample() if sample else (list(FAULTS), cases.clean_cases(clean))
        report = faults_run.measure(where, faults=planted, clean=runs, only=only, again=again, engine=engine)
        if page is not None:
            # Of everything that is kept, not of this run alone.
            store.write_text(page, pages.markdown(faults_run.kept_report(where)))
        if json:
            print_json(report.to_json())
        else:
            _print(report)
        raise typer.Exit(0 if report.status is Status.PASS else 1)


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(box=None, header_style="bold")
    for title in ("model", "fault", "found by", "first culprit"):
        table.add_column(title)
    for found in report.engine:
        table.add_row(found["model"], found["name"], ", ".join(found["detected_by"]) or "[red]not found[/]", "")
    for found in report.faults:
        first = found["culprits"][0]["key"] if found["culprits"] else "-"
        by = ", ".join(found["detected_by"]) or "[red]not found[/]"
        table.add_row(found["model"], found["name"], by, first if found["named_first"] else f"[yellow]{first}[/]")
    if report.faults or report.engine:
        console.print(table)
    for line in summary(report):
        console.print(line, highlight=False)
    for found in report.false_alarms:
        console.print(f"[red]false alarm[/] {found['id']}: {'; '.join(found['alarms'])}", highlight=False)


def summary(report: Report) -> list[str]:
    """Say the counts in a few lines."""
    counts: dict[str, Any] = report.to_json()["counts"]
    named = counts["detected"] - len(counts["misnamed"])
    engine = sum(found["detected"] for found in report.engine)
    if report.engine:
        return [f"{engine} of {counts['engine']} faults found under the engine", f"overall: {report.status.value}"]
    return [
        f"{counts['detected']} of {counts['faults']} faults found ({len(counts['missed'])} that fp32 can see are not)",
        f"{named} of {counts['detected']} named first",
        f"{len(counts['false_alarms'])} false alarms in {counts['clean']} clean runs",
        f"overall: {report.status.value}",
    ]
