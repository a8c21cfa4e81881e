"""The tensor-parallel group: which rank this process is, and the three collectives models need."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor

from pilotage.core.errors import Unsupported


@dataclass(frozen=True)
class TensorParallelGroup:
    """A process group as models see it. With one rank every collective is the identity and no process group is needed.

    The collectives are functional (they return new tensors), so torch.compile traces them with fullgraph=True.

    Attributes:
        rank: of this process in the group.
        world_size: ranks in the group.
        process_group: torch's group; None only with one rank.
    """

    rank: int = 0
    world_size: int = 1
    process_group: dist.ProcessGroup | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over the ranks: any shape -> the same shape on every rank."""
        if self.process_group is None:
            return x
        return collectives.wait_tensor(collectives.all_reduce(x, "sum", self.process_group))

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Concatenate the ranks' x along `dim`, rank 0 first: size s -> s * world_size."""
        if self.process_group is None:
            return x
        gathered = collectives.all_gather_tensor(x.contiguous(), dim % x.ndim, self.process_group)
        return collectives.wait_tensor(gathered)

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Tensor:
        """Sum x over the ranks and keep this rank's piece along `dim`: size s -> s / world_size.

        Raises:
            Unsupported: the size does not divide.
        """
        if self.process_group is None:
            return x
        if x.shape[dim] % self.world_size:
            raise Unsupported(f"{x.shape[dim]} rows do not divide over {self.world_size} ranks", where="reduce_scatter")
        scattered = collectives.reduce_scatter_tensor(x.contiguous(), "sum", dim % x.ndim, self.process_group)
        return collectives.wait_tensor(scattered)


_TP_GROUP = TensorParallelGroup()


def get_tp_group() -> TensorParallelGroup:
    """Return the tensor-parallel group; one rank unless `set_tp_group` said otherwise."""
    return _TP_GROUP


def set_tp_group(process_group: dist.ProcessGroup | None) -> TensorParallelGroup:
    """Make `process_group` the tensor-parallel group of this process; None (or one rank) means no parallelism.

    Models read the group when they are built: set it before.
    """
    global _TP_GROUP
    if process_group is None or dist.get_world_size(process_group) == 1:
        _TP_GROUP = TensorParallelGroup()
    else:
        _TP_GROUP = TensorParallelGroup(
            rank=dist.get_rank(process_group),
            world_size=dist.get_world_size(process_group),
            process_group=process_group,
        )
    return _TP_GROUP
