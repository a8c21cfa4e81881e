"""Run a function in several real processes on gloo."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(function: Callable[..., Any], world_size: int, tmp_path: Path, *args: Any) -> list[Any]:
    """Call `function(rank, *args)` in `world_size` processes that form the tensor-parallel group.

    Returns:
        What each rank returned, by rank.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, args=(world_size, port, tmp_path, function, args), nprocs=world_size)
    return [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(world_size)]


def _rank(
    rank: int, world_size: int, port: int, out: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    from pilotage.parallel import set_tp_group

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    set_tp_group(dist.group.WORLD)
    result = function(rank, *args)
    torch.save(result, out / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
