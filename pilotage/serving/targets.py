"""Which target a process serves on: what the user named, or the device that a probe finds.

The worker is the same on all of them: the batch is built in host memory, what changes between steps is copied to the
device before each run, and logits come back. A target says where tensors live, which library carries collectives and
who compiles. `neuron` and `cuda` are written against the public interfaces of torch-neuronx and torch, and are untested
on hardware.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pilotage.core.environment import switched_on
from pilotage.core.errors import ConfigError, Unavailable
from pilotage.core.targets import TARGETS, Target

if TYPE_CHECKING:
    import torch

TARGET = "PILOTAGE_TARGET"
# Names the chip to compile for where there is none; Neuron's compiler reads it from the environment.
NEURON_OVERRIDE = "NEURON_PLATFORM_TARGET_OVERRIDE"
# With the NKI interpreter the chip is only what its kernels are checked for.
SIMULATOR = "NKI_SIMULATOR"
COMPILE_ONLY = ("PILOTAGE_CPU_COMPILE", "VLLM_NEURON_CPU_COMPILE")


def device(target: Target, local_rank: int) -> torch.device:
    """Return the device of a rank, its library imported and the device made the current one."""
    import torch

    for package in target.packages[:1]:
        importlib.import_module(package)
    if target.name == "cpu":
        return torch.device("cpu")
    torch.accelerator.set_device_index(local_rank)
    return torch.device(target.name, local_rank)


def free_bytes(target: Target, device: torch.device) -> int:
    """Return the bytes that are free on the device; on the CPU what this process may still use."""
    if target.name == "cpu":
        from pilotage.serving import memory

        return memory.free_bytes()
    import torch

    free, _ = torch.accelerator.get_memory_info(device)
    return int(free)


def synchronize(target: Target, device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if target.name != "cpu":
        import torch

        torch.accelerator.synchronize(device)


def _importable(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _present(target: Target) -> bool:
    """Tell whether torch sees a device of this kind; imports the package that registers it."""
    import torch

    if target.name == "cpu":
        return True
    if target.name == "cuda":
        return torch.version.cuda is not None and torch.cuda.device_count() > 0
    with contextlib.suppress(ImportError):
        importlib.import_module(target.packages[0])
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found is not None and found.type == target.name


def select(
    environment: Mapping[str, str] | None = None,
    importable: Callable[[str], bool] = _importable,
    present: Callable[[Target], bool] = _present,
) -> Target:
    """Return the target that the environment asks for, or the one whose device is here.

    `PILOTAGE_TARGET` decides; without it, a chip named by `NEURON_PLATFORM_TARGET_OVERRIDE` means neuron, unless it is
    the NKI interpreter's; without either, the first of neuron and cuda whose packages and device are here, else cpu.

    Raises:
        ConfigError: no target is called so.
    """
    environment = os.environ if environment is None else environment
    stated = environment.get(TARGET)
    if stated:
        if stated not in TARGETS:
            near = difflib.get_close_matches(stated, TARGETS, n=1, cutoff=0.0)[0]
            raise ConfigError(f"no target is called {stated!r}; the nearest is {near!r}", where=TARGET)
        return TARGETS[stated]
    if environment.get(NEURON_OVERRIDE) and not switched_on(SIMULATOR, environment):
        return TARGETS["neuron"]
    for name in ("neuron", "cuda"):
        if all(map(importable, TARGETS[name].packages)) and present(TARGETS[name]):
            return TARGETS[name]
    return TARGETS["cpu"]


def require(
    target: Target,
    environment: Mapping[str, str] | None = None,
    importable: Callable[[str], bool] = _importable,
    present: Callable[[Target], bool] = _present,
) -> None:
    """Raise unless the worker can run on `target` here, or compile for it where that is all that is asked.

    Raises:
        Unavailable: packages are missing, and they are named, or there is no device.
    """
    environment = os.environ if environment is None else environment
    instead = f"or unset {TARGET} and {NEURON_OVERRIDE} to serve on the CPU"
    missing = [name for name in target.packages if not importable(name)]
    if missing:
        raise Unavailable(
            f"the target needs {', '.join(missing)}, which this environment lacks",
            where=f"target {target.name}",
            do=f"install them from the vendor's index, {instead}",
        )
    if switched_on(COMPILE_ONLY, environment) is None and not present(target):
        raise Unavailable(
            "torch sees no such device here",
            where=f"target {target.name}",
            do=f"check the driver, {instead}; with {COMPILE_ONLY[0]}=1 graphs are compiled without a device",
        )
