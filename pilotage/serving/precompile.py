"""Compile a model's graphs without serving it, so that a later start finds them in the compile cache."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pilotage.core.errors import BadInput, Unsupported

_CACHE = "PILOTAGE_COMPILE_CACHE"
_SKIPS = ("PILOTAGE_DISABLE_WARMUP_COMPILE", "VLLM_NEURON_DISABLE_WARMUP_COMPILE")


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What is in the cache now.

    Attributes:
        directory: of the cache.
        graphs: for each graph {"kind", "size", "seconds", "cached"}; `cached` if it was there before.
        seconds: spent on all of them, which compile side by side.
    """

    directory: str
    graphs: tuple[dict[str, Any], ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**asdict(self), "graphs": list(self.graphs)}


@contextlib.contextmanager
def _cache_in(directory: Path | None) -> Iterator[None]:
    before = os.environ.get(_CACHE)
    if directory is not None:
        os.environ[_CACHE] = str(directory)
    try:
        yield
    finally:
        if directory is not None:
            os.environ.pop(_CACHE)
            if before is not None:
                os.environ[_CACHE] = before


def precompile(model: str, *, dtype: str = "bfloat16", cache_dir: Path | None = None) -> Compiled:
    """Compile, or find in the cache, every graph that `smoke`, `validate` and `bench` serve a model with.

    Args:
        model: as for `arch.source.resolve`.
        dtype: serving dtype.
        cache_dir: directory of the compile cache; None for the one that serving uses.

    Raises:
        BadInput: the environment switches the compilation at start off.
        Unsupported: the model is served without graphs.
    """
    skipped = [name for name in _SKIPS if os.environ.get(name) == "1"]
    if skipped:
        raise BadInput("it switches compiling at start off", where=skipped[0], do="unset it")
    from pilotage.arch import source
    from pilotage.serving import settings
    from pilotage.serving.compile_cache import root
    from pilotage.serving.launch import engine

    path = source.resolve(model)
    with _cache_in(cache_dir):
        with engine(path, **settings.shared(path, dtype)) as llm:
            receipt = llm.collective_rpc("receipt")[0]
        directory = str(root())
    if not receipt["buckets"]:
        raise Unsupported("it is served without compiled graphs", where=model, do="there is nothing to compile")
    return Compiled(directory=directory, graphs=tuple(receipt["buckets"]), seconds=receipt["compile_s"])
