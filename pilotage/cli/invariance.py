"""`pilotage invariance`: do the same prompts get the same logits under every condition of serving?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotage.cli._common import STYLES, Json, Model, command_line, print_json

if TYPE_CHECKING:
    from pilotage.accuracy.invariance import Invariance
    from pilotage.accuracy.invariance.judge import Result

ORDER = 52

SHOWN = 2  # broken conditions of a relation that are laid out; the others are named, and the JSON has them all
ROWS = 4


def verb(app: typer.Typer) -> None:
    """Register the command."""

    @app.command(short_help="Run the same prompts under every condition of serving.")
    def invariance(
        model: Model,
        relation: Annotated[
            list[str] | None, typer.Option(metavar="NAME", help="Only this relation; may be given several times.")
        ] = None,
        engine: Annotated[
            list[str] | None, typer.Option(metavar="NAME", help="Only this engine; may be given several times.")
        ] = None,
        json: Json = False,
    ) -> None:
        """Hold every logit of the same prompts under other conditions against those of one request alone.

        Rows that the same compiled graph computes at the same place must be bitwise equal; all others must lie within
        the noise of the dtype, measured on this model. What breaks is named by prompt, position and condition.

        Exits with 0 if everything passes, 1 if anything fails, 2 if something could not be measured.
        """
        from pilotage.accuracy.invariance import ENGINES, RELATIONS
        from pilotage.accuracy.invariance import invariance as measure

        result = measure(
            model,
            engines=tuple(engine or ENGINES),
            relations=tuple(relation or RELATIONS),
            command=command_line(),
        )
        if json:
            print_json(result.to_json())
        else:
            _show(result)
        raise typer.Exit(result.status.exit_code)


def _show(result: Invariance) -> None:
    from rich.console import Console

    console = Console()
    style = STYLES[result.status.value]
    console.print(f"[bold]{result.model}[/bold]: [{style}]{result.status.value}[/{style}]", highlight=False)
    console.print(_matrix(result))
    for found in result.results:
        if found.status.value == "not_measured":
            counted = "" if found.counted else " (not counted)"
            console.print(f"[yellow]{found.relation}[/yellow]: {found.reason}{counted}", highlight=False)
    for (relation, engine), same in _groups(result.broken).items():
        for found in same[:SHOWN]:
            console.print(_broken(found))
        if len(same) > SHOWN:
            names = ", ".join(found.condition for found in same[SHOWN:])
            console.print(f"{relation} ({engine}) is also broken under: {names}", highlight=False)
    for dtype, noise in result.noise.items():
        if noise.row_bound is not None:
            console.print(
                f"[dim]{dtype}: a row may differ by {noise.row_bound:.2g} of its size; {noise.source}[/dim]",
                highlight=False,
            )
    spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result.seconds.items())
    console.print(f"[dim]{spent}[/dim]", highlight=False)


def _groups(results: list[Result]) -> dict[tuple[str, str], list[Result]]:
    groups: dict[tuple[str, str], list[Result]] = {}
    for found in results:
        groups.setdefault((found.relation, found.engine), []).append(found)
    return groups


def _matrix(result: Invariance) -> Any:
    from rich import box
    from rich.table import Table

    table = Table("relation", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("engine", "declared", "verdict", "n"):
        table.add_column(name, no_wrap=True)
    groups = _groups(result.results)
    for relation, row in result.matrix().items():
        for index, (engine, status) in enumerate(row.items()):
            same = groups[relation, engine]
            words = {word for found in same for word in found.expects.split(" and ") if word}
            style = STYLES[status.value]
            table.add_row(
                relation if index == 0 else "",
                engine,
                "both" if len(words) > 1 else "".join(words),
                f"[{style}]{status.value.replace('_', ' ')}[/{style}]",
                str(len(same)),
            )
    return table


def _broken(found: Result) -> Any:
    from rich.table import Table

    failing = sum(verdict.estimate or 0 for verdict in found.verdicts if verdict.metric == "bitwise")
    title = f"{found.relation}: {found.condition} ({found.engine})"
    if failing:
        title += f", {failing:.0f} rows not bitwise equal"
    table = Table("prompt", "position", "computed as", "difference", "bound", title=title, title_justify="left")
    for row in found.broke[:ROWS]:
        difference = row.get("difference")
        table.add_row(
            row["prompt"],
            str(row["position"]),
            row.get("computed", ""),
            "not finite" if difference is None else f"{difference:.3g}",
            "bitwise" if row["expected"] == "bitwise" else f"{row['bound']:.2g}",
        )
    return table
