"""The run directory: who may write into it, what it holds, and what of it is still valid.

    runs/gemma3-270m/
        voyage.json      model, checkpoint, versions, machine, options
        0-diff.json      one record a stage, written whole when the stage has ended
        ...
        logs/<stage>.log
        report.html
        .lock            held by the process that is running the voyage

A stage's record appears when the stage has ended and not before, so an interruption at any moment, kill -9 included,
leaves a directory in which every record is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pilotage.core import store
from pilotage.core.errors import BadInput, StorageError, Unavailable
from pilotage.report.record import EXTRAS, REPORT_FILE, STAGES, VOYAGE_FILE, StageRecord, stage

# A voyage writes a few megabytes of records and logs. Below this it would only fail later, with less to say.
NEEDED_BYTES = 64 << 20


def slug(model: str) -> str:
    """A directory name for MODEL: `tiny:llama3` -> `tiny-llama3`, `org/name` -> `org-name`, a path -> its last part."""
    name = Path(model).expanduser().resolve().name if Path(model).expanduser().exists() else model
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"


class RunDir:
    """A run directory. Create it, then work on it inside `locked()`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def prepare(self) -> None:
        """Create the directory, or check that the one that exists is ours.

        Raises:
            BadInput: something else is there.
            StorageError: it cannot be written, or the disk is almost full.
        """
        if self.path.exists() and not self.path.is_dir():
            raise BadInput("this is a file", where=str(self.path), do="name a directory with --run-dir")
        foreign = self.path.is_dir() and any(self.path.iterdir()) and not (self.path / ".lock").exists()
        if foreign and not (self.path / VOYAGE_FILE).exists():
            raise BadInput(
                "this directory holds other things than a voyage",
                where=str(self.path),
                do="name an empty or new directory with --run-dir",
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"the run directory cannot be created ({error.strerror})",
                where=str(self.path),
                do="name another one with --run-dir",
            ) from error
        self.check_space()

    def check_space(self) -> None:
        """Raise StorageError unless there is room for what a stage writes."""
        free = shutil.disk_usage(self.path).free
        if free < NEEDED_BYTES:
            raise StorageError(
                f"{free >> 20} MB free, {NEEDED_BYTES >> 20} MB needed for records and logs",
                where=str(self.path),
                do="free some space, then run the same command again; completed stages are kept",
            )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory; the lock ends with the process, however it ends.

        Raises:
            Unavailable: another voyage holds it.
        """
        path = self.path / ".lock"
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StorageError(
                f"cannot be written ({error.strerror})", where=str(path), do="name another directory with --run-dir"
            ) from error
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
                raise Unavailable(
                    f"another voyage is using this directory (process {holder})",
                    where=str(self.path),
                    do="wait for it to end, or name another directory with --run-dir",
                ) from error
            os.ftruncate(handle, 0)
            with contextlib.suppress(OSError):  # only for the message above; the lock itself needs no bytes
                os.pwrite(handle, str(os.getpid()).encode(), 0)
            yield
        finally:
            os.close(handle)

    def clear(self) -> None:
        """Remove all records, logs and the report (`--fresh`). Files that are not ours stay."""
        for found in (*STAGES, *EXTRAS):
            (self.path / found.file).unlink(missing_ok=True)
        for name in (VOYAGE_FILE, REPORT_FILE):
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.path / "logs", ignore_errors=True)

    def sweep(self) -> None:
        """Remove what an interrupted write left behind: temporary files, never a record."""
        for leftover in self.path.glob(".*.part"):
            if leftover.is_file():
                leftover.unlink(missing_ok=True)

    def write_voyage(self, voyage: Mapping[str, Any]) -> None:
        store.write_json(self.path / VOYAGE_FILE, dict(voyage))

    def write(self, record: StageRecord) -> None:
        store.write_json(self.path / stage(record.stage).file, record.to_json())

    def drop(self, name: str) -> None:
        (self.path / stage(name).file).unlink(missing_ok=True)

    def kept(self, name: str, fingerprint: str) -> StageRecord | None:
        """The record of a stage if it may stand for a new run of it: completed, judged, and from the same inputs."""
        path = self.path / stage(name).file
        if not path.exists():
            return None
        try:
            record = StageRecord.from_json(store.read_json(path))
        except BadInput:
            return None
        judged = record.status.value in ("pass", "fail")
        return record if record.completed and judged and record.fingerprint == fingerprint else None

    def log(self, name: str) -> Path:
        """Where the standard error of a stage goes."""
        path = self.path / "logs" / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path
