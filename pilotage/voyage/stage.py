"""The small stages that have no command of their own: `python -m pilotage.voyage.stage prepare MODEL | register ARCH`.

They import torch, transformers or vllm, so they run in a process of their own like the rest. JSON on standard output.
"""

from __future__ import annotations

import json
import sys
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


def main(arguments: list[str]) -> int:
    """Run one small stage and print its result."""
    stages = {"prepare": prepare, "register": register}
    if len(arguments) != 2 or arguments[0] not in stages:
        print(f"usage: python -m pilotage.voyage.stage {{{'|'.join(stages)}}} ARGUMENT", file=sys.stderr)
        return 2
    try:
        result = stages[arguments[0]](arguments[1])
    except PilotageError as error:
        print(f"pilotage: {error}", file=sys.stderr)
        return error.exit_code
    json.dump(result, sys.stdout)
    checks = result.get("checks")
    return 1 if checks is not None and not all(check["ok"] for check in checks) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
