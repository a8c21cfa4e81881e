"""`pilotage report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ORDER = 70


def verb(app: typer.Typer) -> None:
    @app.command()
    def report(
        run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A directory that `pilotage onboard` wrote.")],
    ) -> None:
        """Rebuild report.html from the records of a run directory."""
        from pilotage.report.page import build

        typer.echo(build(run_dir))
