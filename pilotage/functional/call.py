"""The facts of a call: what a domain may decide on. No values, so a choice holds for a traced graph."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pilotage.functional import layout
from pilotage.kernels.sharding import divided


class TensorSpec(NamedTuple):
    """What a domain may know of a tensor argument."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    requires_grad: bool
    divided: bool = False  # over ranks, as a DTensor


@dataclass(frozen=True)
class Call:
    """The facts a domain decides on.

    Attributes:
        arguments: every one by name, tensors as `TensorSpec`, defaults filled in.
        layout: dimensions of the operator's tensors, in words; see `functional.layout`.
    """

    operator: str
    arguments: Mapping[str, Any]
    layout: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        return {name: value for name, value in self.arguments.items() if isinstance(value, TensorSpec)}

    @functools.cached_property
    def dims(self) -> Mapping[str, int]:
        """What the letters of the operator's layout (core/shapes.md) stand for, and the integers among its options."""
        numbers = {name: value for name, value in self.arguments.items() if type(value) is int}
        shapes = {name: spec.shape for name, spec in self.tensors.items()}
        return numbers | layout.bind(self.layout, shapes, numbers)[0]

    def refuse_unless(self, *, device: str | None = None, dtypes: tuple[torch.dtype, ...] | None = None) -> str | None:
        """Give the usual reasons against an opaque kernel: another device, another float dtype, a gradient wanted."""
        for name, spec in self.tensors.items():
            if device is not None and spec.device != device:
                return f"{name} is on {spec.device}, not {device}"
            if dtypes is not None and spec.dtype.is_floating_point and spec.dtype not in dtypes:
                return f"{name} is {spec.dtype}"
            if spec.requires_grad:
                return f"{name} needs a gradient"
        return None


def facts(value: Any) -> Any:
    """Return a value that can be a key: of a tensor its facts, marked as such; anything else as it is."""
    if isinstance(value, Tensor):
        wants_grad = value.requires_grad and torch.is_grad_enabled()
        return ("tensor", value.dtype, tuple(value.shape), value.device.type, wants_grad, divided(value))
    return value


def spec_of(facts: Any) -> Any:
    """Return the `TensorSpec` of a tensor's `facts`, anything else as it is."""
    return TensorSpec(*facts[1:]) if isinstance(facts, tuple) and facts[:1] == ("tensor",) else facts
