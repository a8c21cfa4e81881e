"""The `pilotage` command. One file a verb; a verb parses its options, calls one function and prints the result.

Verbs import what they need inside their function: `pilotage --help` must not pay for torch or vllm.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import signal
import sys
from types import FrameType

import typer

from pilotage.core.errors import PilotageError


def application() -> typer.Typer:
    """The command line: each module of this package has a `verb(app)` that adds itself, in the order of its `ORDER`."""
    app = typer.Typer(
        name="pilotage",
        help="Take a Hugging Face causal language model to a verified vLLM deployment on a new target.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    modules = [
        importlib.import_module(f"{__name__}.{found.name}")
        for found in pkgutil.iter_modules(__path__)
        if not found.name.startswith("_")
    ]
    for module in sorted(modules, key=lambda module: module.ORDER):
        module.verb(app)
    return app


def _end(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)


def main() -> None:
    """Run the command line; a user's mistake is one line on standard error and exit code 2."""
    # Asked to end, as `timeout` and `kill` do, a verb still ends the servers that it has started.
    with contextlib.suppress(ValueError):  # not in the main thread: whoever has that decides
        signal.signal(signal.SIGTERM, _end)
    try:
        application()()
    except PilotageError as error:
        print(f"pilotage: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("pilotage: interrupted; run the same command again to resume", file=sys.stderr)
        sys.exit(130)
