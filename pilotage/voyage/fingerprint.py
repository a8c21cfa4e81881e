"""What a stage's result depends on, as one digest: checkpoint, code, packages, options and environment."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pilotage

# Up to this many bytes a checkpoint is read whole (under a second a gigabyte). Of a larger one, the head and tail of
# each weight file, its size and its time of change must do.
WHOLE_BYTES = 8 << 30
_ENDS_BYTES = 1 << 20
_PACKAGES = ("pilotage", "torch", "vllm", "transformers", "safetensors", "tokenizers", "numpy")
_SOURCES = {".py", ".cpp", ".h", ".cu", ".json", ".toml"}
# Places and pools change no result; the rest of our variables, and vLLM's, may.
_HARMLESS = ("PILOTAGE_HOME", "PILOTAGE_COMPILE_CACHE", "PILOTAGE_COMPILE_WORKERS", "PILOTAGE_CHROMIUM")


def _digest(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def checkpoint(directory: Path) -> str:
    """Digest every file of a checkpoint directory by content; of one beyond `WHOLE_BYTES`, the weight files by ends."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and not path.name.startswith("."))
    whole = sum(path.stat().st_size for path in files) <= WHOLE_BYTES
    return _digest([[path.relative_to(directory).as_posix(), _file(path, whole=whole)] for path in files])


def file(path: Path) -> str:
    """Digest one file by content."""
    return _file(path, whole=True)


def _file(path: Path, *, whole: bool) -> str:
    stat = path.stat()
    with open(path, "rb") as file:
        if whole or stat.st_size <= 2 * _ENDS_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(file.read(_ENDS_BYTES))
        file.seek(-_ENDS_BYTES, os.SEEK_END)
        digest.update(file.read())
    return f"{digest.hexdigest()}:{stat.st_size}:{stat.st_mtime_ns}"


@functools.cache
def code() -> str:
    """Digest the sources of pilotage. The report is left out: it is rebuilt every time and changes no result."""
    root = Path(pilotage.__file__).parent
    files = sorted(
        path
        for path in root.rglob("*")
        if path.suffix in _SOURCES and path.is_file() and path.relative_to(root).parts[0] != "report"
    )
    return _digest([[path.relative_to(root).as_posix(), _file(path, whole=True)] for path in files])


def versions() -> dict[str, str]:
    """Versions of the packages that a result may depend on, without importing them."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def environment() -> dict[str, str]:
    """The environment variables that may change a result."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(("PILOTAGE_", "VLLM_")) and name not in _HARMLESS
    }


def stage(name: str, *, checkpoint_digest: str, options: Mapping[str, Any]) -> str:
    """Digest everything that the result of stage `name` depends on; an equal digest means that it may be kept."""
    return _digest([name, checkpoint_digest, code(), versions(), environment(), dict(options)])
