"""Which process is where: pipeline stages, data-parallel shards and tensor-parallel ranks, as one device mesh."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pilotage.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How a run is divided over processes.

    Attributes:
        pp: pipeline stages.
        tp: ranks that divide every layer.
        sequence_parallel: the ranks of `tp` divide the rows between layers as well.
        dp: shards of fully sharded data parallelism; None for what the processes leave.
        ep: ranks that divide the experts of mixture-of-experts layers among them; 1 or `tp`.
    """

    pp: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    dp: int | None = None
    ep: int = 1


@dataclass(frozen=True)
class Mesh:
    """The processes of a run.

    Attributes:
        devices: mesh with the axes "pp", "dp" and "tp"; None where there is one process.
        pp, dp, tp: sizes. pp_rank, dp_rank, tp_rank: this process's place.
    """

    devices: DeviceMesh | None
    pp: int = 1
    dp: int = 1
    tp: int = 1
    pp_rank: int = 0
    dp_rank: int = 0
    tp_rank: int = 0

    def axis(self, name: str) -> DeviceMesh:
        """Return the one-dimensional mesh of an axis."""
        assert self.devices is not None
        return self.devices[name]

    @property
    def first(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.pp_rank == self.dp_rank == self.tp_rank == 0

    @property
    def first_stage(self) -> bool:
        """Whether this process embeds."""
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        """Whether this process has the head and the loss."""
        return self.pp_rank == self.pp - 1


def world_size() -> int:
    """Return the number of processes of this run, by what torchrun says."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def make_mesh(parallel: Parallel, device: str = "cpu") -> Mesh:
    """Lay the processes out as pp x dp x tp; neighbouring ranks share a layer.

    Raises:
        ConfigError: the sizes do not multiply to the number of processes.
    """
    world = world_size()
    each = parallel.pp * parallel.tp
    if world % each or (parallel.dp is not None and parallel.dp * each != world):
        said = f"pp={parallel.pp} x tp={parallel.tp}" + (f" x dp={parallel.dp}" if parallel.dp is not None else "")
        needed = each * (parallel.dp or 1)
        raise ConfigError(
            f"{said} does not fit {world} {'process' if world == 1 else 'processes'}",
            where="parallel",
            do=f"start {needed} of them: torchrun --nproc-per-node {needed} -m pilotage train RECIPE",
        )
    if parallel.ep not in (1, parallel.tp):
        raise ConfigError(
            f"ep={parallel.ep} is neither 1 nor tp={parallel.tp}",
            where="parallel.ep",
            do="the ranks of tp divide the experts among them",
        )
    dp = world // each
    if world == 1:
        return Mesh(None)
    devices = init_device_mesh(device, (parallel.pp, dp, parallel.tp), mesh_dim_names=("pp", "dp", "tp"))
    place: Any = devices.get_coordinate()
    return Mesh(devices, parallel.pp, dp, parallel.tp, *place)


def start(device: str = "cpu") -> bool:
    """Join the processes that torchrun started; returns whether there was anything to do."""
    if world_size() == 1 or dist.is_initialized():
        return False
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    return True


def finish() -> None:
    """Leave together.

    A process whose gloo threads are still talking when the interpreter ends aborts after it has done everything right:
    all wait for all, and the group is taken down while they are still there.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
