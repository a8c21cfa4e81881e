"""`pilotage compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pilotage.cli._common import Json, print_json

if TYPE_CHECKING:
    from pilotage.report.compare import Comparison

ORDER = 72
_SIGNS = {"better": "[green]▲[/green]", "worse": "[red]▼[/red]", "same": "=", "changed": "≠"}

HELP = "A directory that `pilotage onboard` wrote."


def verb(app: typer.Typer) -> None:
    @app.command()
    def compare(
        run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help=HELP)],
        run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help=HELP)],
        out: Annotated[
            Path | None, typer.Option(metavar="FILE", help="Where the page goes; compare.html in RUN_B when not given.")
        ] = None,
        everything: Annotated[bool, typer.Option("--all", help="Print what is the same as well.")] = False,
        json: Json = False,
    ) -> None:
        """Show two runs side by side: before and after a fix. Exits with 1 if RUN_B fails at what RUN_A did not."""
        from pilotage.report.compare import COMPARE_FILE, build
        from pilotage.report.compare import compare as side_by_side

        result = side_by_side(run_a, run_b)
        path = build(result, out if out is not None else run_b / COMPARE_FILE)
        if json:
            print_json({**result.to_json(), "page": str(path)})
        else:
            _show(result, everything)
            typer.echo(f"page: {path}")
        raise typer.Exit(1 if result.worse else 0)


def _show(result: Comparison, everything: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from pilotage.report.text import plain

    def cell(status: str | None, value: object) -> str:
        words = [status.replace("_", " ")] if status else []
        words += [plain(value, 40)] if value is not None else []
        return escape(" ".join(words)) or "[dim]none[/dim]"

    table = Table("", "", "what", "before", "after", box=box.SIMPLE_HEAD, pad_edge=False)
    same = 0
    for line in result.lines:
        if line.change == "same" and not everything:
            same += 1
            continue
        table.add_row(
            _SIGNS[line.change],
            line.part,
            escape(line.name),
            cell(line.a, line.value_a),
            cell(line.b, line.value_b),
        )
    console = Console()
    a, b = result.runs
    console.print(f"{escape(a['path'])}: {a['word']}  →  {escape(b['path'])}: {b['word']}", highlight=False)
    console.print(table)
    if same:
        console.print(f"[dim]{same} lines are the same; --all prints them[/dim]", highlight=False)
