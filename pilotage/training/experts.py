"""Expert parallelism: the ranks of "tp" hold whole experts instead of parts of each."""

from __future__ import annotations

from typing import Any

from torch import nn

from pilotage.core.errors import Unsupported
from pilotage.training.mesh import Mesh


def apply_expert_parallel(model: nn.Module, mesh: Mesh) -> None:
    """Divide the experts of every layer over the ranks of "tp", in place.

    Raises:
        Unsupported: no layer has experts, or they do not divide.
    """
    found: list[Any] = [module for module in model.modules() if type(module).__name__ == "Experts"]
    if not found:
        raise Unsupported("no layer of this model has experts", where="parallel.ep", do="set it to 1")
    raise Unsupported("training with divided experts is not implemented", where="parallel.ep", do="set it to 1")
