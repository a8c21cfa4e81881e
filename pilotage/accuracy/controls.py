"""Clean controls: other correct computations of the same model, whose errors say what noise looks like for it.

The bound that a target is held against comes from these, not from a constant: how far rounding is amplified is a
property of the weights and the prompts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pilotage.accuracy.arms import symmetry
from pilotage.accuracy.arms.hf import HFArm, Mode
from pilotage.core.errors import Unsupported

# Part of the cache key of measured controls: change it with anything that changes what a control computes.
RECIPE = 1


@dataclass(frozen=True, kw_only=True)
class Control:
    """How a control differs from the baseline.

    Attributes:
        name: what the verdict lists.
        attention: transformers' attention implementation.
        change: applied to a copy of the model, or None.
        mode: see `HFArm`.
        compiled: each decoder layer goes through `torch.compile`.
    """

    name: str
    attention: str
    change: Callable[[Any], None] | None = None
    mode: Mode = "whole"
    compiled: bool = False


def _hidden(seed: int) -> Callable[[Any], None]:
    return lambda model: symmetry.permute_hidden(model, seed)


def _inner(seed: int) -> Callable[[Any], None]:
    return lambda model: symmetry.permute_inner(model, seed)


def _both(seed: int) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        symmetry.permute_hidden(model, seed)
        symmetry.permute_inner(model, seed)

    return change


CONTROLS: tuple[Control, ...] = (
    Control(name="eager attention", attention="eager"),
    Control(name="permuted hidden channels", attention="sdpa", change=_hidden(1)),
    Control(name="permuted heads and MLP channels", attention="sdpa", change=_inner(2)),
    Control(name="all permuted", attention="sdpa", change=_both(3)),
    Control(name="all permuted, eager attention", attention="eager", change=_both(4)),
    Control(name="prefill in chunks, KV cache", attention="sdpa", mode="chunked"),
    Control(name="KV cache", attention="sdpa", mode="cached"),
    Control(name="KV cache, eager attention, all permuted", attention="eager", mode="cached", change=_both(5)),
    Control(name="compiled", attention="sdpa", compiled=True),
    Control(name="compiled, all permuted", attention="sdpa", change=_both(6), compiled=True),
)


def arms(model: Any) -> Iterator[tuple[str, HFArm | Unsupported]]:
    """Yield every control of a loaded model, one at a time; one that this architecture cannot have as its reason.

    Args:
        model: a Hugging Face causal language model; it is copied where a control changes it.
    """
    for control in CONTROLS:
        variant = model
        if control.change is not None or control.compiled:
            variant = copy.deepcopy(model)
        before = model.config._attn_implementation
        try:
            if control.change is not None:
                control.change(variant)
        except Unsupported as error:
            yield control.name, error
            continue
        variant.set_attn_implementation(control.attention)
        if control.compiled:
            for layer in variant.get_decoder().layers:
                layer.forward = torch.compile(layer.forward, dynamic=True)
        try:
            yield control.name, HFArm(variant, control.name, mode=control.mode)
        finally:
            model.set_attn_implementation(before)
