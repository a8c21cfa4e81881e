"""`pilotage onboard`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pilotage.cli._common import Json, Model, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from pilotage.report.record import StageRecord
    from pilotage.voyage.embark import Voyage
    from pilotage.voyage.onboard import Watcher

ORDER = 0
_SIGNS = {
    "pass": "[green]✓ pass[/green]",
    "fail": "[red]✗ fail[/red]",
    "not_measured": "[yellow]○ not measured[/yellow]",
}


def verb(app: typer.Typer) -> None:
    @app.command()
    def onboard(
        model: Model,
        run_dir: Annotated[
            Path | None, typer.Option(metavar="DIR", help="Where records and report go; runs/MODEL when not given.")
        ] = None,
        donor: Annotated[
            str, typer.Option(help="The supported model to compare with: llama3, gemma3, qwen2, qwen3, or any MODEL.")
        ] = "llama3",
        reference: Annotated[
            str | None, typer.Option(metavar="MODEL", help="Validate against this checkpoint instead of MODEL's own.")
        ] = None,
        peer_python: Annotated[
            str | None, typer.Option(metavar="PATH", help="Benchmark the vLLM of this Python as well.")
        ] = None,
        skip: Annotated[list[str] | None, typer.Option(metavar="STAGE", help="Leave a stage out; repeatable.")] = None,
        also: Annotated[
            list[str] | None,
            typer.Option(metavar="CHECK", help="Make this check as well: tasks, invariance or localise; repeatable."),
        ] = None,
        redo: Annotated[
            list[str] | None, typer.Option(metavar="STAGE", help="Run a stage again although it is done; repeatable.")
        ] = None,
        fresh: Annotated[bool, typer.Option("--fresh", help="Start over: forget what an earlier run left.")] = False,
        as_json: Json = False,
    ) -> None:
        """Take MODEL through all stages, from checkpoint to report. Run it again to resume."""
        from rich.console import Console

        from pilotage.voyage.course import Options
        from pilotage.voyage.embark import embark

        options = Options(
            donor=donor,
            reference=reference,
            peer_python=peer_python,
            skip=tuple(skip or ()),
            also=tuple(dict.fromkeys(also or ())),
        )
        errors = Console(stderr=True)
        with _Bridge(errors) as bridge:
            voyage = embark(
                model, options, run_dir=run_dir, fresh=fresh, redo=tuple(redo or ()), watcher=bridge.watcher
            )
        if as_json:
            print_json(voyage.to_json())
        else:
            _show(Console(), voyage)
        raise typer.Exit(voyage.arrival.status.exit_code)


class _Bridge:
    """Says on standard error what is going on: a live line on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        from rich.status import Status

        self.console = console
        self.status = Status("", console=console) if console.is_terminal else None
        self.began = 0.0

    def __enter__(self) -> _Bridge:
        return self

    def __exit__(self, *unused: object) -> None:
        if self.status is not None:
            self.status.stop()

    @property
    def watcher(self) -> Watcher:
        from pilotage.voyage.onboard import Watcher

        return Watcher(begins=self._begins, ticks=self._ticks, ended=self._ended)

    def _begins(self, name: str) -> None:
        from pilotage.report.record import stage

        self.began = time.monotonic()
        found = stage(name)
        if self.status is not None:
            self.status.update(f"{found.number} {found.title}")
            self.status.start()
        else:
            self.console.print(f"  {found.number} {found.title} …")

    def _ticks(self, name: str, line: str) -> None:
        if self.status is None:
            return
        from rich.text import Text

        from pilotage.report.record import stage

        found = stage(name)
        minutes, seconds = divmod(int(time.monotonic() - self.began), 60)
        head = f"{found.number} {found.title} {minutes}:{seconds:02d} "
        text = Text(head, overflow="ellipsis", no_wrap=True)
        text.append(line[: max(0, self.console.width - len(head) - 4)], style="dim")
        self.status.update(text)

    def _ended(self, record: StageRecord, kept: bool) -> None:
        from rich.markup import escape

        from pilotage.report.record import stage
        from pilotage.report.text import seconds

        if self.status is not None:
            self.status.stop()
        found = stage(record.stage)
        how = f"kept from {record.started}" if kept else seconds(record.seconds) if record.seconds is not None else ""
        self.console.print(
            f"{_SIGNS[record.status.value]} {found.number} {found.title} [dim]{how}[/dim] {escape(record.summary)}",
            highlight=False,
        )


def _show(console: Console, voyage: Voyage) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from pilotage.report.record import stage
    from pilotage.report.text import seconds

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"{voyage.info['model']}", title_justify="left")
    table.add_column("stage", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("what it found", overflow="fold")
    for record in voyage.arrival.records:
        found = stage(record.stage)
        text = escape(record.summary)
        if record.reason:
            text += f"\n[dim]{escape(record.reason)}[/dim]"
        took = "kept" if record.stage in voyage.arrival.kept else seconds(record.seconds)
        table.add_row(f"{found.number} {found.title}", _SIGNS[record.status.value], took, text)
    console.print(table)
    if voyage.scaffold is not None:
        console.print(
            f"{escape(voyage.info['architecture'])} is not supported yet. Next: read {escape(str(voyage.scaffold))}, "
            "write the places marked in it, register the package in the entry point group pilotage.models, install it, "
            "and run the same command again.",
            highlight=False,
        )
    console.print(f"report: {escape(str(voyage.arrival.report))}", highlight=False, soft_wrap=True)
