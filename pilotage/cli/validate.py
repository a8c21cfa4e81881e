"""`pilotage validate`: is the served model still the same model, token by token and module by module?"""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotage.cli._common import Json, Model, print_json

if TYPE_CHECKING:
    from pilotage.accuracy.validate import Validation
    from pilotage.core.nouns import Verdict

ORDER = 50

STYLES = {"pass": "green", "fail": "bold red", "not_measured": "yellow"}


def verb(app: typer.Typer) -> None:
    """Register the command."""

    @app.command(short_help="Compare the served model with Hugging Face, in three ways.")
    def validate(
        model: Model,
        reference: Annotated[
            str | None,
            typer.Option(
                metavar="MODEL", help="Compare with this checkpoint (the original of a converted one) instead of MODEL."
            ),
        ] = None,
        arm: Annotated[
            list[str] | None, typer.Option(metavar="DTYPE", help="Only this arm: bfloat16 or float32.")
        ] = None,
        modules: Annotated[bool, typer.Option(help="Check single modules as well.")] = True,
        eager: Annotated[
            bool, typer.Option("--eager", help="Do not compile the engine's graphs (float32 never does).")
        ] = False,
        json: Json = False,
    ) -> None:
        """Teacher-force the fp32 reference's tokens through the real engine and judge its errors by clean controls.

        Exits with 0 if everything passes, 1 if anything fails, 2 if something could not be measured.
        """
        from pilotage.accuracy import validate as accuracy

        result = accuracy.validate(
            model,
            reference=reference,
            arms=tuple(arm or accuracy.ARMS),
            modules=modules,
            eager=eager,
            command=shlex.join(["pilotage", *sys.argv[1:]]),
        )
        if json:
            print_json(result.to_json())
        else:
            _show(result)
        raise typer.Exit(result.status.exit_code)


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3g}"


def _show(result: Validation) -> None:
    from rich.console import Console

    console = Console()
    against = "" if result.reference == result.model else f" against {result.reference}"
    style = STYLES[result.status.value]
    console.print(f"[bold]{result.model}[/bold]{against}: [{style}]{result.status.value}[/{style}]", highlight=False)
    console.print(_verdicts(result))
    for source in dict.fromkeys(verdict.bound_source for verdict in _all(result)):
        console.print(f"[dim]bound: {source}[/dim]", highlight=False)
    if result.modules:
        console.print(_modules(result))
    console.print(_numbers(result))
    spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result.seconds.items())
    console.print(f"[dim]{spent}[/dim]", highlight=False)


def _all(result: Validation) -> list[Verdict]:
    return [*result.verdicts, *(verdict for arm in result.arms for verdict in arm.verdicts)]


def _verdicts(result: Validation) -> Any:
    from rich.table import Table

    table = Table("", "claim", "estimate", "95% interval", "bound", "n", title="verdicts", title_justify="left")
    order = ["fail", "not_measured", "pass"]
    for verdict in sorted(_all(result), key=lambda verdict: order.index(verdict.status.value)):
        style = STYLES[verdict.status.value]
        interval = f"{_number(verdict.interval[0])} to {_number(verdict.interval[1])}" if verdict.interval else ""
        claim = verdict.claim
        if "position" in verdict.evidence:
            claim += f" (largest: stream {verdict.evidence['stream']}, position {verdict.evidence['position']})"
        for name, values in verdict.evidence.get("differing", {}).items():
            claim += f"\n  {name}: {values['target']} here, {values['reference']} in the reference"
        table.add_row(
            f"[{style}]{verdict.status.value.replace('_', ' ')}[/{style}]",
            claim,
            _number(verdict.estimate),
            interval,
            _number(verdict.bound),
            str(verdict.n),
        )
    return table


def _numbers(result: Validation) -> Any:
    from rich.table import Table

    table = Table("", *(arm.arm for arm in result.arms), title="numbers", title_justify="left")
    columns = []
    for arm in result.arms:
        rows = [row["target"] for row in arm.by_position]
        ties = sum(tie["tie"] for tie in arm.ties)
        cells = {
            "rows compared": str(arm.n_tokens),
            "baseline": arm.baseline,
            "top-1 differs": f"{len(arm.ties)}, {ties} of them ties",
            "max divergence, ulps": _number(_largest([row["ulps"] for row in rows])),
            "max KL, nats": _number(_largest([row["kl"] for row in rows])),
        }
        for k, found in arm.topk_errors.items():
            cells[f"top-{k} error" if k != "all" else "error over all"] = (
                f"{_number(found['target'])}, baseline {_number(found['baseline'])}"
            )
        columns.append(cells)
    for name in columns[0] if columns else []:
        table.add_row(name, *(cells[name] for cells in columns))
    return table


def _largest(values: list[float | None]) -> float | None:
    """Return the largest value; None (no finite number) if there is one, because that is larger still."""
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def _modules(result: Validation) -> Any:
    from rich.table import Table

    table = Table("kind", "dtype", "pass", "fail", "not measured", "failing", title="modules", title_justify="left")
    for kind, dtype in dict.fromkeys((module["kind"], module["dtype"]) for module in result.modules):
        chosen = [m for m in result.modules if (m["kind"], m["dtype"]) == (kind, dtype)]
        statuses = [module["verdict"]["status"] for module in chosen]
        failing = [m["module"] for m in chosen if m["verdict"]["status"] == "fail"]
        counts = [str(statuses.count(status)) for status in ("pass", "fail", "not_measured")]
        table.add_row(kind, dtype, *counts, ", ".join(failing[:3]) + (" ..." if failing[3:] else ""))
    return table
