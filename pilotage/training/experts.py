"""Expert parallelism: the ranks of "tp" hold whole experts, each others, instead of a part of every one.

All ranks have all rows. Each computes what its own experts make of them, and the sum over the ranks is the block's
output; a row's gradient is summed over the ranks likewise, so the router sees it whole on each.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from pilotage.core.errors import Unsupported
from pilotage.nn import Experts


class _OwnExperts(Experts):
    """Experts of which this rank has some; see `Experts`, whose arithmetic this is."""

    devices: DeviceMesh

    def forward(self, x: Tensor, affinities: Tensor) -> Tensor:
        """Run this rank's experts, and add up what all ranks have made."""
        x, affinities = (self._enter(value) for value in (x, affinities))
        held = self._parameters
        self._parameters = {name: self._local(value) for name, value in held.items()}  # type: ignore[assignment]
        try:
            part = super().forward(x, affinities)
        finally:
            self._parameters = held
        summed = DTensor.from_local(part, self.devices, [Partial()], run_check=False)
        return summed.redistribute(placements=[Replicate()]).to_local()

    def _enter(self, value: Tensor) -> Tensor:
        """The value itself; its gradient is summed over the ranks."""
        whole = DTensor.from_local(value, self.devices, [Replicate()], run_check=False)
        return whole.to_local(grad_placements=[Partial()])

    @staticmethod
    def _local(value: Any) -> Any:
        return value.to_local() if isinstance(value, DTensor) else value


class DealExperts(ParallelStyle):
    """Divide the experts of a module over the ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Experts)
        ranks = device_mesh.size()
        if module.num_experts % ranks:
            raise Unsupported(
                f"{module.num_experts} experts do not divide over ep={ranks}",
                where="parallel.ep",
                do=f"use {[n for n in range(1, module.num_experts + 1) if module.num_experts % n == 0]}",
            )
        each, rank = module.num_experts // ranks, device_mesh.get_local_rank()
        for name, parameter in list(module.named_parameters(recurse=False)):
            dealt = distribute_tensor(parameter.detach(), device_mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(dealt, requires_grad=parameter.requires_grad))
        module.__class__ = _OwnExperts
        module.devices = device_mesh  # type: ignore[assignment]
        module.local_experts = range(rank * each, (rank + 1) * each)
        return module
