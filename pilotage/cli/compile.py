"""`pilotage compile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pilotage.cli._common import Json, Model, print_json

ORDER = 45


def verb(app: typer.Typer) -> None:
    @app.command()
    def compile(
        model: Model,
        dtype: Annotated[str, typer.Option(help="Serving dtype: bfloat16 or float32.")] = "bfloat16",
        cache_dir: Annotated[
            Path | None, typer.Option(help="Where the graphs go; default: PILOTAGE_COMPILE_CACHE, or pilotage's own.")
        ] = None,
        as_json: Json = False,
    ) -> None:
        """Compile the graphs that smoke, validate and bench serve with, and serve nothing."""
        from rich import box
        from rich.console import Console
        from rich.table import Table

        from pilotage.core.errors import BadInput
        from pilotage.serving.precompile import precompile

        if dtype not in ("bfloat16", "float32"):
            raise BadInput(f"{dtype!r} is no serving dtype", where="--dtype", do="use bfloat16 or float32")
        result = precompile(model, dtype=dtype, cache_dir=cache_dir)
        if as_json:
            print_json(result.to_json())
            return
        table = Table("kind", "size", "seconds", "cache", box=box.SIMPLE_HEAD, pad_edge=False)
        for graph in result.graphs:
            where = "was there" if graph["cached"] else "compiled"
            table.add_row(graph["kind"], str(graph["size"]), f"{graph['seconds']:.1f}", where)
        console = Console()
        console.print(table)
        console.print(
            f"{len(result.graphs)} graphs in {result.seconds:.1f} s, kept in {result.directory}", soft_wrap=True
        )
