"""`pilotage doctor`."""

from __future__ import annotations

import typer

from pilotage.cli._common import Json, print_json

ORDER = 80


def verb(app: typer.Typer) -> None:
    @app.command()
    def doctor(as_json: Json = False) -> None:
        """Say what is installed, which targets are usable, what is missing and how to get it."""
        from pilotage.voyage.doctor import MISSING, OK, examine

        result = examine()
        if as_json:
            print_json(result)
        else:
            from rich import box
            from rich.console import Console
            from rich.markup import escape
            from rich.table import Table

            console = Console()
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for column in ("", "part", "found", "to do"):
                table.add_column(column, overflow="fold")
            signs = {OK: "[green]✓[/green]", MISSING: "[red]✗[/red]"}
            for finding in result["findings"]:
                table.add_row(
                    signs.get(finding["state"], "[yellow]![/yellow]"),
                    *(escape(finding[key]) for key in ("part", "found", "do")),
                )
            console.print(table)
            for target in result["targets"]:
                sign = "[green]✓ usable[/green]" if target["usable"] else "[yellow]○ not usable[/yellow]"
                console.print(f"  {target['target']:<7} {sign}  {escape(target['why'])}")
        raise typer.Exit(0 if result["usable"] else 2)
