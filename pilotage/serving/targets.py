"""Which target a process serves on: what the user named, or what a probe finds.

`cpu` is the only target whose worker runs in this version. `neuron` and `cuda` are recognised, so that naming one says
what is missing instead of serving on something else; what stands here about them is untested on hardware.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pilotage.core.errors import ConfigError, Unavailable, Unsupported

TARGET = "PILOTAGE_TARGET"
# Names the chip to compile for where there is none; Neuron's compiler reads it from the environment.
NEURON_OVERRIDE = "NEURON_PLATFORM_TARGET_OVERRIDE"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A kind of device.

    Attributes:
        name: as `PILOTAGE_TARGET` has it.
        packages: modules that must be importable.
        runs: whether the worker of this version runs there.
    """

    name: str
    packages: tuple[str, ...] = ()
    runs: bool = False


TARGETS = {
    target.name: target
    for target in (
        Target(name="cpu", runs=True),
        Target(name="neuron", packages=("torch_neuronx", "nki")),
        Target(name="cuda", packages=("triton",)),
    )
}


def select(environment: Mapping[str, str] | None = None) -> Target:
    """Return the target that the environment asks for.

    `PILOTAGE_TARGET` decides; without it, a chip named by `NEURON_PLATFORM_TARGET_OVERRIDE` means neuron. A device that
    is merely present decides nothing as long as the worker does not run there.

    Raises:
        ConfigError: no target is called so.
    """
    environment = os.environ if environment is None else environment
    stated = environment.get(TARGET)
    if not stated:
        return TARGETS["neuron" if environment.get(NEURON_OVERRIDE) else "cpu"]
    if stated not in TARGETS:
        near = difflib.get_close_matches(stated, TARGETS, n=1, cutoff=0.0)[0]
        raise ConfigError(f"no target is called {stated!r}; the nearest is {near!r}", where=TARGET)
    return TARGETS[stated]


def _importable(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def require(target: Target, importable: Callable[[str], bool] = _importable) -> None:
    """Raise unless the worker runs on `target` here.

    Raises:
        Unavailable: packages are missing; they are named.
        Unsupported: this version has no worker for it.
    """
    missing = [name for name in target.packages if not importable(name)]
    if missing:
        raise Unavailable(
            f"the target needs {', '.join(missing)}, which this environment lacks",
            where=f"target {target.name}",
            do=f"install them from the vendor's index, or unset {TARGET} and {NEURON_OVERRIDE} to serve on the CPU",
        )
    if not target.runs:
        raise Unsupported(
            "the worker of this version keeps weights, pages and batches in host memory and does not run there",
            where=f"target {target.name}",
            do=f"unset {TARGET} and {NEURON_OVERRIDE} to serve on the CPU",
        )
