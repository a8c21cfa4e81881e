"""The kinds of device that there are: one table for serving on them and for kernels made for them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Target:
    """A kind of device.

    Attributes:
        name: as `PILOTAGE_TARGET` and `--target` have it; also torch's name of the device.
        devices: torch's names of its devices, `name` first.
        language: what kernels for it are written in.
        packages: modules that must be importable to serve on it; the first registers the device with torch.
        collectives: backend of torch.distributed.
        compiler: backend of torch.compile that keeps its own cache; None for inductor, whose results this project
            stores.
        cache_variable: environment variable that names the directory of that cache.
        staged: inputs are copied to the device before each run.
        tested: whether it has run on hardware.
    """

    name: str
    devices: tuple[str, ...]
    language: str
    packages: tuple[str, ...] = ()
    collectives: str = "gloo"
    compiler: str | None = None
    cache_variable: str | None = None
    staged: bool = True
    tested: bool = False


TARGETS = {
    target.name: target
    for target in (
        Target(name="cpu", devices=("cpu",), language="C++", staged=False, tested=True),
        Target(
            name="neuron",
            devices=("neuron", "xla"),
            language="NKI",
            packages=("torch_neuronx", "nki"),
            collectives="neuron",
            compiler="neuron",
            cache_variable="TORCH_NEURONX_NEFF_CACHE_DIR",
        ),
        Target(name="cuda", devices=("cuda",), language="Triton", packages=("triton",), collectives="nccl"),
    )
}


def devices_of(names: tuple[str, ...]) -> set[str]:
    """Return torch's names of the devices of some targets."""
    return {device for name in names for device in TARGETS[name].devices}
