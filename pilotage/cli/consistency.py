"""`pilotage consistency`: does training compute the probabilities that serving sampled with?"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from pilotage.cli._common import STYLES, Json, Model, command_line, print_json

if TYPE_CHECKING:
    from pilotage.accuracy.consistency import Consistency

ORDER = 66


def verb(app: typer.Typer) -> None:
    """Register the command."""

    @app.command(short_help="Compare what training computes with what serving sampled.")
    def consistency(
        model: Model,
        arm: Annotated[
            list[str] | None, typer.Option(metavar="DTYPE", help="Only this arm: bfloat16 or float32.")
        ] = None,
        exact: Annotated[
            bool,
            typer.Option(
                "--exact", help="Both sides one row at a time through the same operators: equal bit by bit, and slow."
            ),
        ] = False,
        new_tokens: Annotated[int, typer.Option(min=1, help="Tokens sampled in each of four sequences.")] = 48,
        temperature: Annotated[float, typer.Option(min=0.0, help="Of sampling.")] = 1.0,
        seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
        eager: Annotated[bool, typer.Option("--eager", help="Do not compile the engine's graphs.")] = False,
        json: Json = False,
    ) -> None:
        """Sample from the engine, and let the training class score the same tokens.

        Reported are the differences of log-probabilities over prompt and continuation, and the mean and tail of
        exp|dlogp|, by which reinforcement learning would weigh these samples. Hugging Face in fp32 and in the arm's
        dtype say how large the dtype's own noise is.

        Exits with 0 if everything passes, 1 if anything fails, 2 if something could not be measured.
        """
        from pilotage.accuracy import consistency as accuracy

        found = accuracy.consistency(
            model,
            arms=tuple(arm or accuracy.ARMS),
            exact=exact,
            new_tokens=new_tokens,
            temperature=temperature,
            seed=seed,
            eager=eager,
            command=command_line(),
        )
        if json:
            print_json(found.to_json())
        else:
            _show(found)
        raise typer.Exit(found.status.exit_code)


def _show(found: Consistency) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160)
    style = STYLES[found.status.value]
    console.print(f"[bold]{found.model}[/bold]: [{style}]{found.status.value}[/{style}]", highlight=False)
    columns = ("arm", "phase", "tokens", "equal", "max |dlogp|", "RMS", "mean exp|dlogp|", "99%", "max", "noise of HF")
    table = Table(*columns, title="training minus serving", title_justify="left")
    for arm in found.arms:
        for phase, row in arm.phases.items():
            numbers = ("max_abs", "rms", "mean_ratio", "p99_ratio", "max_ratio", "baseline_rms_error")
            table.add_row(arm.arm, phase, str(row["n"]), str(row["equal"]), *(f"{row[name]:.4g}" for name in numbers))
    console.print(table)
    for arm in found.arms:
        for verdict in arm.verdicts:
            if verdict.status.value != "pass":
                said = f"{verdict.claim}: {verdict.metric} {verdict.estimate}, bound {verdict.bound}"
                console.print(f"[{STYLES[verdict.status.value]}]{said}[/]", highlight=False)
        seconds = ", ".join(f"{name} {value:.1f} s" for name, value in arm.cost.items())
        console.print(f"[dim]{arm.arm}: {seconds}[/dim]", highlight=False)
