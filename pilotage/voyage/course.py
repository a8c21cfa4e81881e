"""The course of a voyage: which command runs each stage of MODEL, and what its result depends on."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pilotage.report.record import EXTRAS

CLI = (sys.executable, "-m", "pilotage")


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One stage as planned.

    Attributes:
        stage: its name.
        command: program and arguments that print its JSON; empty where `result` is known without a process.
        shown: the command as a user would type it.
        result: the result of a stage that needs no process.
        depends: options that its result depends on, for the fingerprint.
        needs: stages that must have completed before it makes sense.
        light: it keeps one core busy for seconds, and may run beside its light neighbours.
    """

    stage: str
    command: Sequence[str] = ()
    shown: str = ""
    result: Mapping[str, Any] | None = None
    depends: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    light: bool = False


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for, as far as a stage depends on it."""

    donor: str = "llama3"
    reference: str | None = None
    peer_python: str | None = None
    skip: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


def _verb(*arguments: str) -> tuple[tuple[str, ...], str]:
    return (*CLI, *arguments, "--json"), shlex.join(("pilotage", *arguments))


def plot(model: str, info: Mapping[str, Any], options: Options, run_dir: Path) -> list[Leg]:
    """Plan the stages for a model.

    Args:
        model: MODEL as the user wrote it.
        info: what `voyage.stage prepare` found out: architecture, supported, origin.
        options: the user's options.
        run_dir: where a scaffold goes.
    """
    diff_command, diff_shown = _verb("diff", donor_model(options.donor), model)
    legs = [Leg(stage="diff", command=diff_command, shown=diff_shown, depends={"donor": options.donor}, light=True)]
    if not info["supported"]:
        return [*legs, _scaffold(model, info, options, run_dir)]
    legs.append(
        Leg(
            stage="implement",
            result={key: info.get(key) for key in ("architecture", "supported", "origin")} | {"files": []},
            light=True,
        )
    )
    legs.append(
        Leg(
            stage="register",
            command=(sys.executable, "-m", "pilotage.voyage.stage", "register", info["architecture"]),
            shown=f"python -m pilotage.voyage.stage register {shlex.quote(info['architecture'])}",
            light=True,
        )
    )
    weights_command, weights_shown = _verb("weights", model)
    legs.append(Leg(stage="weights", command=weights_command, shown=weights_shown, light=True))
    # The ledger was just proven by the stage before; `pilotage smoke` on its own proves it itself.
    smoke_command, _ = _verb("smoke", model, "--no-ledger")
    _, smoke_shown = _verb("smoke", model)
    legs.append(Leg(stage="smoke", command=smoke_command, shown=smoke_shown, needs=("register", "weights")))
    reference = ("--reference", options.reference) if options.reference else ()
    command, shown = _verb("validate", model, *reference)
    legs.append(
        Leg(
            stage="validate",
            command=command,
            shown=shown,
            depends={"reference": options.reference},
            needs=("register", "weights", "smoke"),
        )
    )
    legs += [_extra(extra.name, model, options) for extra in EXTRAS if extra.name in options.also]
    peer = ("--peer-python", options.peer_python) if options.peer_python else ()
    command, shown = _verb("bench", model, *peer)
    legs.append(
        Leg(
            stage="bench",
            command=command,
            shown=shown,
            depends={"peer_python": options.peer_python},
            needs=("register", "weights", "smoke"),
        )
    )
    return legs


def _extra(name: str, model: str, options: Options) -> Leg:
    """Plan one of the checks that are made on request."""
    reference = ("--reference", options.reference) if options.reference else ()
    arguments = {
        "tasks": ("validate", model, *reference, "--level", "1"),
        "invariance": ("invariance", model),  # of the served model alone
        "localise": ("localise", model, *reference),
    }[name]
    command, shown = _verb(*arguments)
    depends = {} if name == "invariance" else {"reference": options.reference}
    return Leg(stage=name, command=command, shown=shown, depends=depends, needs=("register", "weights", "smoke"))


def donor_model(donor: str) -> str:
    """The MODEL to compare with for `--donor`: the small checkpoint of an in-tree package, or what the user named."""
    return f"tiny:{donor}" if donor in ("llama3", "gemma3", "qwen2", "qwen3") else donor


def _scaffold(model: str, info: Mapping[str, Any], options: Options, run_dir: Path) -> Leg:
    name, out = package_name(info), str(run_dir / "scaffold")
    command = (sys.executable, "-m", "pilotage.voyage.stage", "scaffold", name, model, options.donor, out)
    shown = shlex.join(("pilotage", "new", name, "--from", model, "--donor", options.donor, "--out", out))
    return Leg(stage="implement", command=command, shown=shown, depends={"donor": options.donor})


def package_name(info: Mapping[str, Any]) -> str:
    """A Python package name for the architecture: its model type without what a name may not hold."""
    raw = str(info.get("model_type") or info["architecture"]).lower()
    name = "".join(letter if letter.isalnum() else "_" for letter in raw).strip("_")
    return name if name[:1].isalpha() else f"model_{name}"
