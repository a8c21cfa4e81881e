"""Metrics of a run: one JSON object a line, and TensorBoard files beside them if asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pilotage.core import store
from pilotage.core.errors import Unavailable

FILE = "metrics.jsonl"


class Metrics:
    """Appends to metrics.jsonl in a run's directory.

    Args:
        out: the directory.
        step: of the checkpoint that the run goes on from; lines of later steps are of a run that was cut off there,
            and are removed.
        tensorboard: write its files too.

    Raises:
        Unavailable: tensorboard is not installed.
    """

    def __init__(self, out: Path, *, step: int, tensorboard: bool) -> None:
        self.path = out / FILE
        kept = [line for line in read(out) if line["step"] <= step] if step else []
        store.write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = open(self.path, "a")  # noqa: SIM115  open as long as the run
        self._board = _board(out / "tensorboard", step) if tensorboard else None

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the values of a step; steps count from 1."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def _board(path: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise Unavailable(
            "the package tensorboard is not installed", where="log.tensorboard", do="pip install pilotage[train]"
        ) from error
    return SummaryWriter(str(path), purge_step=step + 1)


def read(out: Path) -> list[dict[str, Any]]:
    """Read the lines of a run; one that was cut off while it was written is left out."""
    path = out / FILE
    found = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found
