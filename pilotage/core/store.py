"""Writing that is never left half done: everything goes to a temporary name first and is renamed when whole."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pilotage.core.errors import BadInput, StorageError

T = TypeVar("T")


def home() -> Path:
    """Directory for what is built once and reused: converted checkpoints, tiny models, compiled graphs.

    `PILOTAGE_HOME` names another one.
    """
    return Path(os.environ.get("PILOTAGE_HOME") or Path.home() / ".cache" / "pilotage")


@contextlib.contextmanager
def as_storage_error(path: Path) -> Iterator[None]:
    """Turn a full disk and a place that may not be written into a StorageError that names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(
                "no space left on the device", where=str(path), do="free some space or name another directory"
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise StorageError(
                "this place cannot be written", where=str(path), do="name a directory that you may write"
            ) from error
        raise


def write_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` produce a file at a temporary name beside `path`, then rename it to `path`.

    Raises:
        StorageError: the disk is full or the place may not be written; `path` is then as it was before.
    """
    with as_storage_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            with open(temporary, "rb") as written:
                os.fsync(written.fileno())
            temporary.chmod(0o644)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path`, whole or not at all."""

    def write(temporary: Path) -> None:
        temporary.write_bytes(data)

    write_file(path, write)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, whole or not at all."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` as indented JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        BadInput: the file is missing or is not JSON.
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise BadInput("no such file", where=str(path)) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"not valid JSON ({error})", where=str(path), do="repair or replace the file") from error


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory beside `path` that becomes `path` when the block ends without an error.

    An existing `path` is replaced. On any error the temporary directory is removed and `path` stays as it was.
    """
    with as_storage_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part"))
        try:
            yield temporary
            temporary.chmod(0o755)
            if path.exists():
                old = temporary.with_suffix(".old")
                path.rename(old)
                temporary.rename(path)
                shutil.rmtree(old, ignore_errors=True)
            else:
                temporary.rename(path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def keyed(folder: str, key: Sequence[Any]) -> Path:
    """Return where below `home()` a result is kept whose key, of JSON values, names everything that it depends on."""
    name = hashlib.sha256(json.dumps(list(key), default=str).encode()).hexdigest()
    return home() / folder / f"{name[:32]}.json"


def kept(path: Path, read: Callable[[Any], T]) -> T | None:
    """Return what `read` makes of a kept JSON value; None for one that is not there, damaged, or of another form.

    Args:
        path: from `keyed`.
        read: raises BadInput, AttributeError, KeyError or TypeError for a value that is not of its form.
    """
    if not path.is_file():
        return None
    try:
        return read(read_json(path))
    except (BadInput, AttributeError, KeyError, TypeError):
        return None
