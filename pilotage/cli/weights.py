"""`pilotage weights MODEL`: the weight ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from pilotage.cli._common import Json, Model, print_json

if TYPE_CHECKING:
    from pilotage.weights.ledger import Ledger, TensorEntry

ORDER = 25
_SHOWN = 20


def verb(app: typer.Typer) -> None:
    @app.command()
    def weights(model: Model, as_json: Json = False) -> None:
        """Prove the weights: every tensor used once or dropped with a reason, every parameter written once."""
        from pilotage.models.proof import weight_ledger

        ledger = weight_ledger(model)
        if as_json:
            print_json(ledger.to_json())
        else:
            _print(ledger)
        raise typer.Exit(ledger.status.exit_code)


def _print(ledger: Ledger) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from pilotage.weights.folding import fold

    table = Table(title=f"Weight ledger of {ledger.model}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("checkpoint tensor", overflow="fold", no_wrap=True)
    for column in ("shape", "becomes"):
        table.add_column(column, overflow="fold")
    rows = [
        (entry.key, ("×".join(map(str, entry.shape)) or "scalar", entry.dtype, entry.action, _becomes(entry)))
        for entry in ledger.tensors
    ]
    for row in fold(rows):
        shape, dtype, action, text = row.value
        style = {"drop": "yellow", "error": "bold red"}.get(action)
        table.add_row(escape(row.name), f"{shape} {dtype}", escape(text), style=style)
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    console.print(table)
    counts = ledger.counts()
    console.print(
        f"{counts['tensors']} tensors, {counts['bytes'] / 1e6:.1f} MB: {counts['loaded']} loaded, {counts['dropped']} "
        f"dropped; {counts['written_once']} of {counts['parameters']} parameters written once"
    )
    for problem in ledger.problems[:_SHOWN]:
        console.print(f"[red]{problem.kind}[/] {escape(problem.name)}: {escape(problem.text)}", highlight=False)
    if len(ledger.problems) > _SHOWN:
        console.print(f"and {len(ledger.problems) - _SHOWN} more; --json lists them all")
    colours = {"pass": "green", "fail": "red", "not_measured": "yellow"}
    for verdict in ledger.verdicts():
        status = verdict.status.value
        console.print(f"[{colours[status]}]{status}[/] {verdict.claim} (n={verdict.n})", highlight=False)


def _becomes(entry: TensorEntry) -> str:
    """Say which parameters a tensor becomes, without repeating its own name; or why it is dropped or in error."""
    if entry.action != "load":
        return f"{entry.action}: {entry.reason}"
    return ", ".join("same name" if target == entry.key else target for target in entry.targets)
