"""Compile the C++ operators for this machine, once, and load them."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from pilotage.core import store
from pilotage.core.errors import PilotageError

_HERE = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-std=c++20", "-fopenmp", "-fPIC", "-shared", "-w")
_TIMEOUT_S = 300


class _NotBuilt(Exception):
    """Why there is no library, in words for `explain()`."""


@functools.cache
def unavailable() -> str | None:
    """Make `torch.ops.pilotage.native_*` usable: build if need be, and load.

    Returns:
        None when they are usable, else the reason why not. Decided once a process.
    """
    try:
        torch.ops.load_library(_library())
    except _NotBuilt as error:
        reason = str(error)
    except (PilotageError, OSError) as error:
        reason = f"the compiled kernels cannot be used ({error})"
    else:
        _register_fakes()
        return None
    print(f"pilotage: CPU kernels are off, plain torch runs instead: {reason}", file=sys.stderr)
    return reason


@functools.cache
def has_bf16_products() -> bool:
    """Whether this processor multiplies bf16 numbers by themselves; elsewhere the kernels turn them into fp32 first."""
    return "avx512_bf16" in _processor()


def _library() -> Path:
    """Return the compiled library of this source, compiler, torch and processor; build it if it is not there."""
    compiler = os.environ.get("CXX") or next((c for c in ("g++", "c++", "clang++") if shutil.which(c)), None)
    if compiler is None:
        raise _NotBuilt("no C++ compiler was found; install g++ or name one in CXX")
    directory = store.home() / "kernels"
    path = directory / f"pilotage-{_key(compiler)}.so"
    if path.exists():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:  # held until the file is closed
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            print("pilotage: compiling CPU kernels, once on this machine (about 10 s)", file=sys.stderr)
            store.write_file(path, lambda temporary: _compile(compiler, temporary))
    return path


def _compile(compiler: str, output: Path) -> None:
    root = Path(torch.__file__).parent
    includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    command = [*compiler.split(), *_FLAGS, *includes, str(_HERE / "ops.cpp"), "-o", str(output), *libraries]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise _NotBuilt(f"{compiler} did not finish in {_TIMEOUT_S} s") from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise _NotBuilt(f"{compiler} failed: {(errors or done.stderr.splitlines() or ['no message'])[0]}")


def _key(compiler: str) -> str:
    try:
        version = subprocess.run(
            [*compiler.split(), "--version"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise _NotBuilt(f"{compiler} does not run ({error})") from error
    digest = hashlib.sha256()
    for part in (compiler, version, torch.__version__, sys.version, *_FLAGS, _processor()):
        digest.update(part.encode() + b"\0")
    for source in [*sorted(_HERE.glob("*.h")), _HERE / "ops.cpp"]:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


def _processor() -> str:
    """Name the instruction set: a cache directory may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _register_fakes() -> None:
    def linear(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
        return x.new_empty((*x.shape[:-1], weight.shape[0]))

    def mlp(x: Tensor, gate_up: Tensor, down: Tensor, *rest: object) -> Tensor:
        return x.new_empty((*x.shape[:-1], down.shape[0]))

    def like_q(q: Tensor, *rest: object) -> Tensor:
        return q.new_empty(q.shape)

    def by_row(x: Tensor) -> Tensor:
        return x.new_empty(x.shape[:1], dtype=torch.int64)

    def nothing(*args: object) -> None:
        return None

    torch.library.register_fake("pilotage::native_linear", linear)
    torch.library.register_fake("pilotage::native_likely_linear", linear)
    torch.library.register_fake("pilotage::native_mlp", mlp)
    torch.library.register_fake("pilotage::native_argmax", by_row)
    torch.library.register_fake("pilotage::native_packed_attention", like_q)
    torch.library.register_fake("pilotage::native_paged_attention", like_q)
    torch.library.register_fake("pilotage::native_write_kv", nothing)
