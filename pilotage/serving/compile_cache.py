"""Compiled graphs on disk, so that a second start does not compile.

One directory per fingerprint: everything that decides what a graph computes (the code of pilotage and of the model's
package, the configurations, shapes and strides of weights and pages, torch, compiler, CPU, threads). In it, one file
per graph, and the shared libraries that torch's compiler built for them. Nothing is trusted that does not match the
checksum written beside it: a damaged file is removed and built again.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import inspect
import io
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pilotage.core import store
from pilotage.core.errors import StorageError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_DIRECTORY_NAMES = ("PILOTAGE_COMPILE_CACHE", "VLLM_NEURON_COMPILE_CACHE")
_HEADER = b"pilotage graph 1\n"
# Packages whose code can change what a graph computes. The command line and the reports cannot.
_CODE = ("core", "functional", "kernels", "models", "nn", "parallel", "probe", "serving")
_KEPT = 12  # fingerprints whose graphs stay on disk; the least recently used go first


def root() -> Path:
    """Return the directory of all compiled graphs; `PILOTAGE_COMPILE_CACHE` names another one."""
    stated = next((os.environ[name] for name in _DIRECTORY_NAMES if os.environ.get(name)), None)
    return Path(stated) if stated else store.home() / "compile"


def fingerprint(vllm_config: VllmConfig, model: torch.nn.Module, caches: Mapping[str, Any], extra: Any) -> str:
    """Hash everything but the bucket that decides what a graph of this model computes.

    Args:
        vllm_config: vLLM's configuration.
        model: with loaded weights; their shapes, strides and dtypes count, their values do not.
        caches: layer name -> [keys, values].
        extra: further JSON values, e.g. the target configuration.
    """
    import torch._inductor.config as inductor_config

    # Where a checkpoint lies says nothing about its graphs.
    hf_config = {key: value for key, value in vllm_config.model_config.hf_config.to_dict().items() if key[0] != "_"}
    parts = {
        "code": [_code(), *_code_of(type(model))],
        "hf_config": hf_config,
        "weights": {
            name: [str(p.dtype), list(p.shape), list(p.stride())]
            for name, p in (*model.named_parameters(), *model.named_buffers())
        },
        "caches": {
            name: [[str(t.dtype), list(t.shape), list(t.stride()), t.storage_offset()] for t in pair]
            for name, pair in caches.items()
        },
        "rank": [vllm_config.parallel_config.rank, vllm_config.parallel_config.world_size],
        "torch": [torch.__version__, torch.version.git_version, sys.version],
        "inductor": inductor_config.save_config_portable(),
        "cpu": [torch.backends.cpu.get_cpu_capability(), _cpu_flags(), torch.get_num_threads()],
        "compiler": _compiler(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(
                ("PILOTAGE_DISABLE_KERNELS", "VLLM_NEURON_DISABLE_KERNELS", "TORCHINDUCTOR_", "TORCH_COMPILE")
            )
            and name != "TORCHINDUCTOR_CACHE_DIR"
        },
        "extra": extra,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


@functools.cache
def _code() -> str:
    """Hash the code of this package as it was when this process first asked, which is the code it runs."""
    packages = Path(__file__).parents[1]
    files = [file for name in _CODE for file in sorted((packages / name).rglob("*")) if _is_code(file)]
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()


@functools.cache
def _code_of(model: type) -> tuple[str, ...]:
    """Hash the directories that define a model class outside of this package and torch."""
    directories = set()
    for kind in model.__mro__:
        if kind.__module__.partition(".")[0] not in ("pilotage", "torch", "builtins", "abc", "typing"):
            directories.add(Path(inspect.getfile(kind)).parent)
    files = [file for directory in sorted(directories) for file in sorted(directory.glob("*")) if _is_code(file)]
    return tuple(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)


def _is_code(file: Path) -> bool:
    return file.suffix in (".py", ".cpp", ".h", ".hpp", ".c", ".cu")


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compiler() -> str:
    found = shutil.which(os.environ.get("CXX") or "g++")
    return f"{found} {os.stat(found).st_size}" if found else "none"


class CompileCache:
    """The graphs of one fingerprint; use it as a context manager around all compiling and loading.

    While it is entered, other processes that want the same graphs wait, and then find them.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.libraries = directory / "inductor"
        self._manifest = directory / "manifest.json"

    def __enter__(self) -> CompileCache:
        import torch._inductor.utils as inductor_utils

        try:
            self.libraries.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.directory / "lock", "wb")
        except OSError as error:
            raise StorageError(
                f"compiled graphs cannot be kept there ({error.strerror})",
                where=str(self.directory),
                do="name another directory with PILOTAGE_COMPILE_CACHE",
            ) from error
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.utime(self.directory)
        self._remove_untrusted()
        # torch remembers libraries that this process loaded and would not write them here again.
        inductor_utils.clear_caches()
        self._before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.libraries)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = self._before
        with contextlib.suppress(StorageError):  # a full disk must not stop a server that has its graphs
            store.write_json(self._manifest, {str(f.relative_to(self.libraries)): _sum(f) for f in self._built()})
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        self._lock.close()
        _prune(self.directory.parent)

    def _built(self) -> Iterator[Path]:
        return (file for file in self.libraries.rglob("*.so") if file.is_file())

    def _remove_untrusted(self) -> None:
        """Remove libraries that are damaged, or left by a run that was interrupted."""
        try:
            known = json.loads(self._manifest.read_text())
        except (OSError, ValueError):
            known = {}
        for file in list(self._built()):
            if known.get(str(file.relative_to(self.libraries))) != _sum(file):
                file.unlink()

    def _file(self, name: str) -> Path:
        return self.directory / f"{name}.graph"

    def has(self, name: str) -> bool:
        """Tell whether a graph is stored as `name`; it may still prove damaged."""
        return self._file(name).exists()

    def load(self, name: str) -> tuple[Any, dict[str, Any]] | None:
        """Return the graph stored as `name` with what was noted about it, or None if there is no sound one."""
        path = self._file(name)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        try:
            magic, header, payload = data.split(b"\n", 2)
            noted = json.loads(header)
            if magic + b"\n" != _HEADER or noted["sha256"] != hashlib.sha256(payload).hexdigest():
                raise ValueError("checksum")
            return torch.compiler.load_compiled_function(io.BytesIO(payload)), noted["notes"]
        except Exception:  # whatever is wrong with it, it is only a copy of what can be built again
            path.unlink(missing_ok=True)
            return None

    def save(self, name: str, graph: Any, notes: Mapping[str, Any]) -> bool:
        """Store a graph; False if there was no room for it, which costs the next start some time and nothing else."""
        payload = type(graph).serialize(graph).serialized_data
        header = {"sha256": hashlib.sha256(payload).hexdigest(), "notes": dict(notes)}
        try:
            store.write_bytes(self._file(name), _HEADER + json.dumps(header).encode() + b"\n" + payload)
        except StorageError:
            return False
        return True


def _sum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _prune(directory: Path) -> None:
    """Keep the most recently used fingerprints; leave those alone that another process may be building."""
    used = [(seconds, path) for path in directory.iterdir() if (seconds := _last_used(path)) is not None]
    for seconds, path in sorted(used)[:-_KEPT]:
        if time.time() - seconds > 3600:
            shutil.rmtree(path, ignore_errors=True)


def _last_used(path: Path) -> float | None:
    """Return when a directory was used; None if there is none, as where another process has just removed it."""
    try:
        return path.stat().st_mtime if path.is_dir() else None
    except OSError:
        return None
