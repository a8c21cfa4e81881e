"""How the CPU's compiler is asked to compile a graph, and what it needs to be there."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

from pilotage.core.errors import ConfigError, Unavailable

_WORKERS_NAMES = ("PILOTAGE_COMPILE_WORKERS", "VLLM_NEURON_COMPILE_WORKERS")


def no_guards(guards: Sequence[Any]) -> list[bool]:
    """Keep none of the guards: a graph is called with inputs of its own shapes only."""
    return [False for _ in guards]


def options() -> dict[str, Any]:
    """Return the compiler options, which are part of every graph's fingerprint."""
    return {
        "fx_graph_cache": False,  # the graph file holds its result
        # torch shells out to openssl for this; a minimal machine has none.
        "cpp_cache_precompile_headers": shutil.which("openssl") is not None,
        # Inputs have one shape and the operators' results are known: looking again costs a step as much as a layer.
        "size_asserts": False,
        "alignment_asserts": False,
        # The loops of a few rows are over before a second thread has begun; with the other core at work on requests,
        # waiting for it can take milliseconds.
        "cpp.min_chunk_size": 4096,
    }


@contextlib.contextmanager
def nothing_folded() -> Iterator[None]:
    """Keep inductor from folding an addition into a product: a tap between the two would prevent it, and show."""
    import torch._inductor.fx_passes.post_grad as post_grad

    before = post_grad.should_prefer_unfused_addmm
    post_grad.should_prefer_unfused_addmm = lambda match: True
    try:
        yield
    finally:
        post_grad.should_prefer_unfused_addmm = before


def workers() -> int | None:
    """Return how many graphs the user wants compiled at once; None where nothing is said.

    Raises:
        ConfigError: what is said is no number.
    """
    stated = next((os.environ[name] for name in _WORKERS_NAMES if os.environ.get(name)), None)
    if stated is None:
        return None
    try:
        return max(1, int(stated))
    except ValueError as error:
        raise ConfigError(
            f"{stated!r} is no number", where=_WORKERS_NAMES[0], do="give a number of processes"
        ) from error


def load() -> None:
    """Do what every copy of this process would otherwise do again: import the compiler, probe the CPU's vectors."""
    import torch._inductor.compile_fx  # noqa: F401
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    pick_vec_isa()


def require() -> None:
    """Look for the C++ compiler that inductor calls.

    Raises:
        Unavailable: there is none.
    """
    if shutil.which(os.environ.get("CXX") or "g++") is None:
        raise Unavailable("no C++ compiler (g++) found", where="torch.compile", do="install g++ or set CXX")
