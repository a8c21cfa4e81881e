"""`pilotage train`: pretrain or fine-tune by a recipe, on one process or as many as torchrun starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotage.cli._common import Json, print_json

if TYPE_CHECKING:
    from pilotage.training.run import Outcome

ORDER = 65


def verb(app: typer.Typer) -> None:
    """Register the command."""

    @app.command(short_help="Pretrain or fine-tune a model by a recipe.")
    def train(
        recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file; see examples/train.")],
        resume: Annotated[
            bool, typer.Option("--resume", help="There must be a checkpoint to go on from. [default: if there is one]")
        ] = False,
        fresh: Annotated[bool, typer.Option("--fresh", help="Remove what earlier runs left and begin again.")] = False,
        json: Json = False,
    ) -> None:
        """Train the definition that is served, and write checkpoints that transformers and vLLM load.

        A run that was cut off goes on from its last whole checkpoint when the same command is run again, also on
        another number of processes. Several: torchrun --nproc-per-node 4 -m pilotage train RECIPE.

        Exits with 0 when the run is done, 2 for a recipe or machine that does not do.
        """
        from pilotage.training.recipe import Recipe
        from pilotage.training.run import Watcher
        from pilotage.training.run import train as run

        first = int(os.environ.get("RANK", "0")) == 0
        checked = Recipe.from_file(recipe)
        with _Bar(first) as bar:
            watcher = Watcher(begins=bar.begins, step=bar.step, saved=bar.saved)
            outcome = run(checked, resume=resume, fresh=fresh, watcher=watcher)
        if first and json:
            print_json(outcome.to_json())
        elif first:
            _show(outcome)


class _Bar:
    """A progress bar on a terminal; nothing elsewhere."""

    def __init__(self, first: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(file=sys.stderr)
        self.progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not (first and console.is_terminal),
        )
        self.task: Any = None

    def __enter__(self) -> _Bar:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def begins(self, step: int, steps: int) -> None:
        self.task = self.progress.add_task("", total=steps, completed=step, said="")

    def step(self, step: int, values: dict[str, float]) -> None:
        said = f"loss {values['loss']:.4f}, {values['tokens_per_second']:,.0f} tokens/s"
        if "evaluation_loss" in values:
            said += f", held out {values['evaluation_loss']:.4f}"
        self.progress.update(self.task, completed=step, said=said)

    def saved(self, path: Path) -> None:
        self.progress.console.print(f"[dim]saved {path}[/dim]", highlight=False) if not self.progress.disable else None


def _show(outcome: Outcome) -> None:
    from rich.console import Console

    console = Console()
    began = f" (from step {outcome.resumed_from} on)" if outcome.resumed_from else ""
    learned = f"{outcome.trainable:,} of {outcome.parameters:,} parameters"
    console.print(f"{outcome.steps} steps{began}, {learned}", highlight=False)
    for name, value in (("loss", outcome.loss), ("held-out loss", outcome.evaluation)):
        if value is not None:
            console.print(f"{name} {value:.4f}", highlight=False)
    if outcome.seconds:
        rate = outcome.tokens / outcome.seconds
        console.print(f"{outcome.tokens:,} tokens in {outcome.seconds:.1f} s, {rate:,.0f} a second", highlight=False)
    console.print(f"model: {outcome.model}", highlight=False, soft_wrap=True)
