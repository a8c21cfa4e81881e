"""`pilotage new NAME --from MODEL`: the package of a new model, with the work marked in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pilotage.cli._common import MODEL_HELP

ORDER = 20


def verb(app: typer.Typer) -> None:
    @app.command("new")
    def new(
        name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the package, e.g. qwen3x.")],
        model: Annotated[str, typer.Option("--from", metavar="MODEL", help=f"The model to port: {MODEL_HELP}.")],
        donor: Annotated[str, typer.Option("--donor", help="The package to start from.")] = "llama3",
        out: Annotated[
            Path | None,
            typer.Option(
                "--out", metavar="DIR", help="Write a project of its own; the default is pilotage/models/NAME."
            ),
        ] = None,
        force: Annotated[bool, typer.Option("--force", help="Overwrite a package that is there.")] = False,
    ) -> None:
        """Write a model package from a donor's, every work item of the diff as a marked place."""
        from rich.console import Console

        from pilotage.arch.scaffold import scaffold
        from pilotage.arch.scaffold.text import show

        show(scaffold(name, model, donor, out, force=force), Console())
