"""`nki.collectives`: between devices, of which the interpreter has one. Importing works, calling does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pilotage.kernels.nki.faults import fault


class ReplicaGroup:
    """Names the ranks of a collective."""

    def __init__(self, groups: Any = None) -> None:
        self.groups = groups


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        fault(
            f"nki.collectives.{name}: the interpreter has one device, and a collective needs several",
            do="let torch.distributed exchange tensors between two kernels; two cores of one device use sendrecv",
        )

    return refuse
