"""The small stages that have no command with JSON of their own: `python -m pilotage.voyage.stage STAGE ARGUMENT...`.

    prepare MODEL | register ARCHITECTURE | scaffold NAME MODEL DONOR DIRECTORY

They import torch, transformers or vllm, so they run in a process of their own like the rest. JSON on standard output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pilotage.core.errors import BadInput, PilotageError
from pilotage.voyage import fingerprint


def prepare(model: str) -> dict[str, Any]:
    """Find the checkpoint and say what it is; builds `gemma3-270m` and the tiny models on first use.

    A model whose architecture nothing serves needs no weights here: its configuration is enough for the diff and the
    scaffold.

    Returns:
        {"model", "architecture", "model_type", "supported", "origin", "checkpoint", "fingerprint"}.

    Raises:
        PilotageError: the model cannot be found or read.
    """
    from pilotage.arch import source
    from pilotage.models import registry

    config = source.load_config(model)
    architectures = list(config.architectures or [])
    if not architectures:
        raise BadInput(
            "config.json names no architecture", where=model, do='add "architectures": ["...ForCausalLM"] to it'
        )
    entry = registry.find(architectures)
    found = {
        "model": model,
        "architecture": entry.architecture if entry is not None else architectures[0],
        "model_type": str(config.model_type),
        "supported": entry is not None,
        "origin": entry.origin if entry is not None else None,
    }
    if entry is not None:
        path = source.resolve(model)
        return {**found, "checkpoint": str(path), "fingerprint": fingerprint.checkpoint(path)}
    place = source.config_dir(model)
    file = place if place.is_file() else place / "config.json"
    return {**found, "checkpoint": str(place), "fingerprint": fingerprint.file(file)}


def register(architecture: str) -> dict[str, Any]:
    """Ask a fresh vLLM whether it finds platform and model by itself."""
    from pilotage.serving.registration import check

    return {"architecture": architecture, "checks": check(architecture)}


def scaffold(name: str, model: str, donor: str, directory: str) -> dict[str, Any]:
    """Write the package of a new model, or leave the one that is already there as it is.

    Someone may be working in it: a second voyage must not write over that.
    """
    from pilotage.arch import source

    architecture = next(iter(source.load_config(model).architectures or ["?"]))
    out = Path(directory)
    common = {"architecture": architecture, "supported": False, "package": name, "directory": str(out)}
    if (out / name).exists():
        files = sorted(str(path) for path in out.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return {**common, "files": files, "written": False}
    from pilotage.arch.scaffold import scaffold as write

    made = write(name, model, donor, out)
    return {
        **common,
        "files": [str(path) for path in made.files],
        "written": True,
        "work_items": [item.title for item in made.work_items],
        "tests": str(made.tests),
        "notes": list(made.notes),
    }


def main(arguments: list[str]) -> int:
    """Run one small stage and print its result."""
    stages: dict[str, tuple[Callable[..., dict[str, Any]], int]] = {
        "prepare": (prepare, 1),
        "register": (register, 1),
        "scaffold": (scaffold, 4),
    }
    name, *rest = arguments or [""]
    if name not in stages or len(rest) != stages[name][1]:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        result = stages[name][0](*rest)
    except PilotageError as error:
        print(f"pilotage: {error}", file=sys.stderr)
        return error.exit_code
    json.dump(result, sys.stdout)
    if result.get("supported") is False and name == "scaffold":
        return 2  # the stage is not done before the marked places are
    checks = result.get("checks")
    return 1 if checks is not None and not all(check["ok"] for check in checks) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
