"""What a process may do about graphs: compile those that are missing, only load them, or compile and serve nothing.

The last is for machines without the device: `PILOTAGE_CPU_COMPILE=1 PILOTAGE_TARGET=cpu vllm serve MODEL ...` fills the
compile cache with every graph that the same command serves with, and ends.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from pilotage.core import store
from pilotage.core.environment import switched_on
from pilotage.core.errors import ConfigError, Unavailable
from pilotage.serving import targets
from pilotage.serving.targets import COMPILE_ONLY

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_LOAD_ONLY = ("PILOTAGE_DISABLE_WARMUP_COMPILE", "VLLM_NEURON_DISABLE_WARMUP_COMPILE")
# Where the ranks of an engine say that they have compiled; set for the processes that this one starts.
_DONE = "PILOTAGE_COMPILED_DIRECTORY"
_POLL_S = 0.1


def compiles() -> bool:
    """Tell whether this process may compile."""
    return switched_on(_LOAD_ONLY) is None


def compiles_only() -> bool:
    """Tell whether this process compiles and then ends."""
    return switched_on(COMPILE_ONLY) is not None


def not_compiled(names: Sequence[str], directory: Path) -> Unavailable:
    """Return the error for graphs that are not in the cache of a process that does not compile."""
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return Unavailable(
        f"not in the compile cache, and {switched_on(_LOAD_ONLY)}=1 forbids compiling: {shown}",
        where=str(directory),
        do="run `pilotage compile`, or the same command once with PILOTAGE_CPU_COMPILE=1; the settings, the code and "
        "the machine's CPU must be the same",
    )


def require(environment: Mapping[str, str] | None = None) -> None:
    """Check the variables of this module against one another.

    Raises:
        ConfigError: they exclude each other, or no target is named to compile for.
    """
    environment = os.environ if environment is None else environment
    only = switched_on(COMPILE_ONLY, environment)
    if only is None:
        return
    load = switched_on(_LOAD_ONLY, environment)
    if load is not None:
        raise ConfigError(f"{only} and {load} exclude each other", where="environment", do="unset one")
    if not any(environment.get(name) for name in (targets.TARGET, targets.NEURON_OVERRIDE)):
        raise ConfigError(
            "no target is named to compile for", where=only, do=f"set {targets.TARGET}, for instance to cpu"
        )


def end_when_compiled(vllm_config: VllmConfig) -> None:
    """Have this process end, with 0, when every rank of the engine that it starts has compiled.

    Does nothing unless compiling is all that was asked for, and nothing in the processes that an engine starts.
    """
    if not compiles_only() or multiprocessing.parent_process() is not None or _DONE in os.environ:
        return
    if vllm_config.model_config.enforce_eager:
        raise ConfigError(
            "enforce_eager leaves nothing to compile", where=str(switched_on(COMPILE_ONLY)), do="remove one of the two"
        )
    directory = Path(tempfile.mkdtemp(prefix="pilotage-compiled-"))
    os.environ[_DONE] = str(directory)
    ranks = vllm_config.parallel_config.world_size
    threading.Thread(target=_wait_and_end, args=(directory, ranks), daemon=True).start()


def compiled(rank: int, graphs: Sequence[Mapping[str, Any]]) -> None:
    """Say that a rank has compiled, and wait for the end where there is nothing else to do.

    Args:
        rank: this process's.
        graphs: the table of `graphs.Graphs`.
    """
    if not compiles_only() or _DONE not in os.environ:
        return
    from pilotage.serving.compile_cache import root

    store.write_json(Path(os.environ[_DONE]) / f"rank{rank}.json", {"graphs": list(graphs), "directory": str(root())})
    while True:  # what comes next in an engine is to serve
        time.sleep(1)


def _wait_and_end(directory: Path, ranks: int) -> None:
    while len(found := sorted(directory.glob("rank*.json"))) < ranks:
        time.sleep(_POLL_S)
    for path in found:
        done = json.loads(path.read_text())
        rank = f"{path.stem}: " if ranks > 1 else ""
        new = sum(not graph["cached"] for graph in done["graphs"])
        seconds = sum(graph["seconds"] for graph in done["graphs"])
        what = f"{len(done['graphs'])} graphs, {new} compiled now ({seconds:.1f} s)"
        print(f"pilotage: {rank}{what}, in {done['directory']}")
    sys.stdout.flush()
    shutil.rmtree(directory, ignore_errors=True)
    children = psutil.Process().children(recursive=True)
    for child in children:
        child.terminate()
    _, alive = psutil.wait_procs(children, timeout=5)
    for child in alive:
        child.kill()
    os._exit(0)  # the main thread is waiting for an engine that will not come
