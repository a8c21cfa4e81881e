"""`pilotage bench`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pilotage.cli._common import Json, Model, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from pilotage.bench.run import Bench

ORDER = 60


def verb(app: typer.Typer) -> None:
    @app.command()
    def bench(
        model: Model,
        loads: Annotated[
            str | None,
            typer.Option(
                help="Comma-separated: decode-x1, decode-x8, prefill-1024, mixed (by default all that fit), "
                "decode-x32, serve-64 (they take minutes)."
            ),
        ] = None,
        repeats: Annotated[int, typer.Option(min=1, help="Times that every arm runs every load, in turns.")] = 2,
        peer_python: Annotated[
            str | None, typer.Option(metavar="PATH", help="Interpreter of another vLLM environment to compare with.")
        ] = None,
        peer_env: Annotated[
            list[str] | None, typer.Option(metavar="KEY=VALUE", help="Environment variable for the peer's server.")
        ] = None,
        no_hf: Annotated[bool, typer.Option("--no-hf", help="Leave Hugging Face out.")] = False,
        no_profile: Annotated[bool, typer.Option("--no-profile", help="Leave out where the time goes.")] = False,
        port: Annotated[int | None, typer.Option(help="Port of our server; a free one by default.")] = None,
        logs: Annotated[Path | None, typer.Option(help="Directory for the logs of all processes.")] = None,
        as_json: Json = False,
    ) -> None:
        """Measure the real server with `vllm bench serve`, against Hugging Face and another vLLM in the same run.

        Exit code 0 when everything asked for was measured, 2 when not.
        """
        from rich.console import Console

        from pilotage.bench.run import bench as run
        from pilotage.core.errors import BadInput

        for pair in peer_env or []:
            if "=" not in pair:
                raise BadInput(f"{pair!r} is no KEY=VALUE", where="--peer-env")
        errors = Console(stderr=True)
        result = run(
            model,
            loads=loads,
            repeats=repeats,
            peer_python=peer_python,
            peer_environment=peer_env or (),
            hf=not no_hf,
            profile=not no_profile,
            port=port,
            logs=logs,
            say=lambda text: errors.print(f"bench: {text}"),
            bar=lambda total: _bar(errors, total),
        )
        if as_json:
            print_json(result.to_json())
        else:
            _show(Console(), result)


@contextlib.contextmanager
def _bar(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        done = 0

        def step(text: str) -> None:
            nonlocal done
            progress.update(task, description=text, completed=done)  # it is only starting
            done += 1

        yield step
        progress.update(task, description="done", completed=total)


def _show(console: Console, result: Bench) -> None:
    import statistics

    from rich import box
    from rich.markup import escape
    from rich.table import Table

    def spread(values: list[float] | None) -> str:
        if not values:
            return "-"
        middle = f"{statistics.median(values):.4g}"
        return middle if len(values) == 1 else f"{middle} ({min(values):.4g}-{max(values):.4g})"

    names = list(result.arms)
    table = Table("load", "metric", *names, box=box.SIMPLE_HEAD, pad_edge=False, title="median (range)")
    for load in dict.fromkeys(load for arm in result.arms.values() for load in arm):
        metrics = dict.fromkeys(metric for arm in result.arms.values() for metric in arm.get(load, {}))
        for first, metric in enumerate(metrics):
            cells = [spread(arm.get(load, {}).get(metric)) for arm in result.arms.values()]
            table.add_row("" if first else load, metric, *cells)
        table.add_section()
    console.print(table)

    if result.ratios:
        title = "how many times better we are, paired by repeat"
        table = Table("load", "metric", "against", box=box.SIMPLE_HEAD, pad_edge=False, title=title)
        for name in ("ratio", "range", "n"):
            table.add_column(name, justify="right")
        for row in result.ratios:
            ratio = f"{row['ratio']:.2f}"
            colour = "green" if row["ratio"] >= 1 else "yellow" if row["ratio"] >= 0.8 else "red"
            spread_text = f"{row['low']:.2f}-{row['high']:.2f}"
            table.add_row(
                row["load"], row["metric"], row["against"], f"[{colour}]{ratio}[/]", spread_text, str(row["n"])
            )
        console.print(table)

    if result.where_time_goes:
        title = "where the time of a step goes"
        table = Table("load", "part", box=box.SIMPLE_HEAD, pad_edge=False, title=title)
        table.add_column("ms", justify="right")
        table.add_column("share", justify="right")
        last = None
        for row in sorted(result.where_time_goes, key=lambda row: list(result.loads).index(row["load"])):
            share = f"{100 * row['share']:.0f}%" if row["share"] is not None else ""
            table.add_row("" if row["load"] == last else row["load"], row["part"], f"{row['ms']:.2f}", share)
            last = row["load"]
        console.print(table)

    for name, about in result.loads.items():
        console.print(f"{name}: {about}", style="dim")
    facts = {**result.machine, **{k: v for k, v in result.versions.items() if isinstance(v, str)}}
    console.print(escape(", ".join(f"{key} {value}" for key, value in facts.items())), style="dim")
    for command in result.commands:
        console.print(f"$ {command}", style="dim", markup=False, highlight=False, soft_wrap=True)
