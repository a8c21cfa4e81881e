"""The weight ledger of a model given by name: its package, built unsharded on the meta device, and its checkpoint."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from typing import Any

import torch
from torch import nn

from pilotage.arch import source
from pilotage.core.errors import Unsupported
from pilotage.models import registry
from pilotage.weights import WeightMap
from pilotage.weights.ledger import Ledger, ledger


def weight_ledger(model: str) -> Ledger:
    """Account for every tensor of `model`'s checkpoint (see `pilotage.weights.ledger.ledger`).

    Args:
        model: whatever `arch.source.resolve` takes.

    Raises:
        BadInput, Unavailable: the checkpoint cannot be found or read.
        Unsupported: no model package serves its architecture.
    """
    path = source.resolve(model)
    config = source.load_config(str(path))
    entry = registry.find(config.architectures or [])
    if entry is None:
        raise Unsupported(
            f"no model package serves {', '.join(config.architectures or ['an unnamed architecture'])}",
            where=str(path / "config.json"),
            do=f"scaffold one: pilotage new NAME --from {model}; served are {', '.join(sorted(registry.entries()))}",
        )
    with torch.device("meta"):
        built = entry.load().from_configs(config, None)
    return dataclasses.replace(ledger(path, map_of(built), built), model=model)


def map_of(model: nn.Module) -> WeightMap:
    """Return the WeightMap of a built model: its class's `weight_map`, or that of `weights.py` beside its module.

    Raises:
        Unsupported: neither is there.
    """
    make: Any = getattr(type(model), "weight_map", None)
    package = type(model).__module__.rpartition(".")[0]
    if make is None and package and importlib.util.find_spec(f"{package}.weights"):
        make = getattr(importlib.import_module(f"{package}.weights"), "weight_map", None)
    if make is None:
        raise Unsupported(
            "the model package has no weight map", where=package, do="write weights.py with weight_map(config)"
        )
    return make(getattr(model, "config", None))
