"""How a model of transformers counts its tokens, and how it is made to count from the positions of a step.

Most take `position_ids`, and take them as they are. BERT's relatives begin to count behind their padding token, and add
that themselves only where they are given no positions. The decoders of BART's relatives take none, but ask a module for
their position embeddings that does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pilotage.serving.fallback.attention import Step


@dataclass(frozen=True, kw_only=True)
class Counting:
    """How a model counts.

    Attributes:
        offset: what it adds to positions that it makes by itself; must be added to those that it is given.
        limit: how many positions it has embeddings for; None where it has no table of them.
        told: modules that are handed a step's positions by a hook.
    """

    offset: int = 0
    limit: int | None = None
    told: tuple[nn.Module, ...] = ()


def learn(hf: nn.Module, run: Callable[[], Any], takes_positions: bool) -> Counting:
    """Watch which positions a model makes when it is given none.

    Args:
        hf: the model.
        run: runs its forward on a few token ids alone.
        takes_positions: whether the forward has an argument `position_ids`.
    """
    seen: list[tuple[nn.Embedding, tuple[Any, ...], dict[str, Any]]] = []

    def note(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        assert isinstance(module, nn.Embedding)
        seen.append((module, arguments, named))

    handles = [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for name, module in hf.named_modules()
        if isinstance(module, nn.Embedding) and "pos" in name.rpartition(".")[2]
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    if not takes_positions:
        told = [module for module, _, named in seen if isinstance(named.get("position_ids"), Tensor)]
        limits = [module.num_embeddings - int(getattr(module, "offset", 0)) for module in told]
        return Counting(limit=min(limits, default=None), told=tuple(told))
    for module, arguments, _ in seen:
        takes_more = "position_ids" in inspect.signature(type(module).forward).parameters
        ids = arguments[0] if arguments and not takes_more else None
        if isinstance(ids, Tensor) and ids.ndim and not ids.is_floating_point():
            first, places = int(ids.flatten()[0]), torch.arange(ids.shape[-1])
            if first and bool((ids == places + first).all()):
                return Counting(offset=first, limit=module.num_embeddings - first)
    return Counting()


def tell(module: nn.Module, step: Step) -> None:
    """Hand a module the positions of the step that runs, in place of those that the model counted."""

    def replace(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any] | None:
        counted = named.get("position_ids")
        if step.positions is None or not isinstance(counted, Tensor):
            return None
        return arguments, {**named, "position_ids": step.positions.long().view(counted.shape)}

    module.register_forward_pre_hook(replace, with_kwargs=True)
