"""`pilotage diff A B`: what differs from a donor model, and the work that follows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pilotage.cli._common import MODEL_HELP, Json

ORDER = 10


def verb(app: typer.Typer) -> None:
    @app.command("diff")
    def diff(
        a: Annotated[
            str, typer.Argument(metavar="A", help=f"The donor, already supported: {MODEL_HELP}, or a config.json.")
        ],
        b: Annotated[str, typer.Argument(metavar="B", help="The new model, given like A.")],
        as_json: Json = False,
        html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page to FILE.")] = None,
    ) -> None:
        """Compare two architectures by config, module tree and source; downloads no weights."""
        from rich.console import Console

        from pilotage.arch.diff import diff as compare
        from pilotage.arch.diff.page import page
        from pilotage.arch.diff.text import show
        from pilotage.cli._common import print_json
        from pilotage.core.store import write_text

        found = compare(a, b)
        if html is not None:
            write_text(html, page(found))
            Console(stderr=True).print(f"written to {html}")
        if as_json:
            print_json(found.to_json())
        elif html is None:
            show(found, Console())
