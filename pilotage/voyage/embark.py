"""Prepare a voyage: find the checkpoint, plan the legs, take the run directory, and sail."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotage.core.errors import BadInput
from pilotage.report.record import EXTRAS, stage
from pilotage.voyage import course, fingerprint, onboard, process
from pilotage.voyage.course import Options
from pilotage.voyage.onboard import Arrival, Watcher
from pilotage.voyage.rundir import RunDir, slug


@dataclass(frozen=True, kw_only=True)
class Voyage:
    """A finished voyage, with what its table and its last words need.

    Attributes:
        info: what was found out about the model.
        arrival: how it ended.
        run_dir: where everything is.
        scaffold: directory of the scaffold, for an architecture that nothing serves yet.
    """

    info: dict[str, Any]
    arrival: Arrival
    run_dir: Path
    scaffold: Path | None

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.info["model"],
            "architecture": self.info["architecture"],
            "status": self.arrival.status.value,
            "run_dir": str(self.run_dir),
            "report": str(self.arrival.report),
            "scaffold": str(self.scaffold) if self.scaffold is not None else None,
            "stages": [
                {
                    "stage": record.stage,
                    "status": record.status.value,
                    "seconds": record.seconds,
                    "summary": record.summary,
                    "reason": record.reason,
                    "kept": record.stage in self.arrival.kept,
                }
                for record in self.arrival.records
            ],
        }


def embark(
    model: str,
    options: Options,
    *,
    run_dir: Path | None = None,
    fresh: bool = False,
    redo: tuple[str, ...] = (),
    watcher: Watcher | None = None,
) -> Voyage:
    """Onboard MODEL into a run directory.

    Args:
        model: MODEL of the command line.
        options: what the stages depend on.
        run_dir: None takes runs/<model> under the working directory.
        fresh: forget what an earlier run left there.
        redo: stages to run again although their record is still valid.
        watcher: told what happens.

    Raises:
        PilotageError: the model cannot be found, the directory cannot be used, or the disk is full.
    """
    for name in (*options.skip, *redo):
        stage(name)  # an unknown name is an error now, not after an hour
    for name in options.also:
        if stage(name) not in EXTRAS:
            raise BadInput(
                f"{name} is a stage of every voyage",
                where="--also",
                do=f"name one of {', '.join(e.name for e in EXTRAS)}",
            )
    if options.peer_python is not None and not Path(options.peer_python).exists():
        raise BadInput(
            "no such file", where=f"--peer-python {options.peer_python}", do="name the other environment's python"
        )
    run = RunDir(run_dir if run_dir is not None else Path("runs") / slug(model))
    run.prepare()
    with run.locked():
        if fresh:
            run.clear()
        # Its standard error goes to ours: a licence notice or a download is for the user to see now.
        asked = process.run((sys.executable, "-m", "pilotage.voyage.stage", "prepare", model), log=None)
        if asked.result is None:
            raise SystemExit(asked.exit_code if asked.exit_code in (1, 2) else 2)
        info = asked.result
        legs = course.plot(model, info, options, run.path)
        voyage = {
            "model": model,
            "architecture": info["architecture"],
            "target": "cpu",
            "checkpoint": info["checkpoint"],
            "fingerprint": info["fingerprint"],
            "started": onboard.now(),
            "command": _command(model, options, run_dir),
            "versions": fingerprint.versions(),
            "machine": onboard.machine(),
            "environment": fingerprint.environment(),
        }
        arrival = onboard.sail(run, legs, voyage, skip=options.skip, redo=redo, watcher=watcher)
    scaffold = None if info["supported"] else run.path / "scaffold"
    return Voyage(info=info, arrival=arrival, run_dir=run.path, scaffold=scaffold)


def _command(model: str, options: Options, run_dir: Path | None) -> str:
    """The command line that sails this voyage again, with the options that are not the default."""
    words = ["pilotage", "onboard", model]
    defaults = Options()
    for flag, value, default in (
        ("--donor", options.donor, defaults.donor),
        ("--reference", options.reference, None),
        ("--peer-python", options.peer_python, None),
        ("--run-dir", str(run_dir) if run_dir is not None else None, None),
    ):
        if value != default and value is not None:
            words += [flag, value]
    for name in options.skip:
        words += ["--skip", name]
    for name in options.also:
        words += ["--also", name]
    return shlex.join(words)
