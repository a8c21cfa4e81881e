"""Compile a model's graphs without serving it, so that a later start finds them in the compile cache."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pilotage.core.environment import environment
from pilotage.core.errors import BadInput, Unsupported
from pilotage.serving import compile_mode, targets

_CACHE = "PILOTAGE_COMPILE_CACHE"


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What is in the cache now.

    Attributes:
        directory: of the cache.
        graphs: for each graph {"kind", "size", "name", "seconds", "cached"}; `cached` if it was there before.
        seconds: spent on all of them, which compile side by side.
    """

    directory: str
    graphs: tuple[dict[str, Any], ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**asdict(self), "graphs": list(self.graphs)}


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
    if not compile_mode.compiles():
        raise BadInput("it forbids compiling", where="PILOTAGE_DISABLE_WARMUP_COMPILE", do="unset it")
    from pilotage.arch import source
    from pilotage.serving import settings
    from pilotage.serving.compile_cache import root
    from pilotage.serving.launch import engine

    path = source.resolve(model)
    variables = dict.fromkeys(targets.COMPILE_ONLY, "0")  # that mode ends the process, this one reports
    if cache_dir is not None:
        variables[_CACHE] = str(cache_dir.absolute())
    with environment(variables):
        with engine(path, **settings.shared(path, dtype)) as llm:
            receipt = llm.collective_rpc("receipt")[0]
        directory = str(root())
    if not receipt["buckets"]:
        raise Unsupported("it is served without compiled graphs", where=model, do="there is nothing to compile")
    return Compiled(directory=directory, graphs=tuple(receipt["buckets"]), seconds=receipt["compile_s"])
