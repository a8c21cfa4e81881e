"""Directories that are built once, by one process, whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from pilotage.core import store
from pilotage.core.errors import StorageError


def built_once(path: Path, write: Callable[[Path], None]) -> Path:
    """Return `path`, letting `write` fill it first when it does not exist yet.

    Several processes may ask at once: one builds, the others wait for it. `write` gets a temporary directory that is
    renamed to `path` when complete, so a killed build leaves nothing under the final name.

    Raises:
        StorageError: the place cannot be written, or the disk is full.
    """
    if path.is_dir():
        return path
    lock = path.parent / f".{path.name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = open(lock, "w")  # noqa: SIM115  (closing it is what releases the lock)
    except OSError as error:
        raise StorageError(
            f"cannot be written ({error.strerror})",
            where=str(path.parent),
            do="set PILOTAGE_HOME to a directory that you may write",
        ) from error
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        if not path.is_dir():
            for left in path.parent.glob(f".{path.name}.*.part"):  # by a build that was killed
                shutil.rmtree(left, ignore_errors=True)
            with store.new_directory(path) as directory:
                try:
                    write(directory)
                except SafetensorError as error:
                    if "os error 28" not in str(error):
                        raise
                    raise OSError(errno.ENOSPC, str(error)) from error
                for file in directory.iterdir():
                    file.chmod(0o644)
    return path
