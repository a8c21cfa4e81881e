"""Options that several verbs share, and how results are printed."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Annotated, Any

import typer

MODEL_HELP = "a local directory, a Hugging Face id, gemma3-270m, or tiny:<llama3, gemma3, qwen3_moe, ...>"

Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON for machines.")]


# Of a status, where a verb prints one.
STYLES = {"pass": "green", "fail": "bold red", "not_measured": "yellow"}


def command_line() -> str:
    """Return the command that was given, for the result that it makes."""
    return shlex.join(["pilotage", *sys.argv[1:]])


def print_json(value: Any) -> None:
    """Print `value` as one JSON document on standard output; everything else a verb says goes to standard error."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")
