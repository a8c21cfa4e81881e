"""A plan for one model: the buffers of its sites, and the hooks that make modules into sites.

Every site has a buffer of its own (one stacked buffer costs a tenth of a step) as large as the largest graph; smaller
graphs get the beginning of it. Layers with the same sites still share compiled code, because buffers are inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pilotage.core import sites
from pilotage.core.errors import ConfigError
from pilotage.core.tap import TapPlan, active
from pilotage.probe.discovery import SiteInfo, describe, hooked, modules_of
from pilotage.probe.replacement import ReplacementContext

Size = tuple[int, int]


class Taps:
    """What is recorded and what can be replaced in one model.

    Args:
        model: built; its weights do not matter.
        capture: patterns of sites that are recorded, see `core.sites.matcher`.
        replace: patterns of sites that can be replaced.
        num_tokens: token rows of the largest step.
        num_sampled: rows of logits of the largest step.
        where: what the patterns are part of, for errors.
        known: result of `describe(model)`, where the caller has it.

    Attributes:
        sites: what is known of each site of the model.
        capture, replace: chosen names, in the order of computation.
        buffers: site -> [rows, ...], what the last step recorded.

    Raises:
        ConfigError: a pattern that matches no site.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        capture: Sequence[str] = (),
        replace: Sequence[str] = (),
        num_tokens: int,
        num_sampled: int,
        where: str = "tensor_capture",
        known: dict[str, SiteInfo] | None = None,
    ) -> None:
        self.model, self.size = model, (num_tokens, num_sampled)
        self.sites = describe(model) if known is None else known
        tapped = [name for name, info in self.sites.items() if info.shape is not None]
        self.capture = sites.select(capture, tapped, where=where) if capture else []
        self.replace = sites.select(replace, self.sites, where=where) if replace else []
        shapeless = [name for name in self.replace if self.sites[name].shape is None]
        if shapeless:
            raise ConfigError(
                "the model asks for this replacement and never taps the value, so its shape is unknown",
                where=shapeless[0],
                do="call tap() or give the live value in the model's code",
            )
        device = next(model.parameters()).device
        self.buffers = {name: self._buffer(name, device) for name in self.capture}
        self.references = {name: self._buffer(name, device) for name in self.replace}
        self.masks = {name: torch.zeros(self._rows(name), dtype=torch.bool, device=device) for name in self.replace}
        self._plans: dict[Size, TapPlan] = {}
        self._contexts: dict[tuple[Size, bool], ReplacementContext] = {}
        hooked_places = {*self.capture, *self.replace}
        self._modules = {
            name: module
            for name, module in modules_of(model).items()
            if name in hooked_places or f"{name}.input" in hooked_places
        }
        self._places = hooked_places

    def _rows(self, name: str) -> int:
        return self.size[1] if self.sites[name].sampled else self.size[0]

    def _buffer(self, name: str, device: torch.device) -> Tensor:
        info = self.sites[name]
        assert info.shape is not None
        return torch.zeros((self._rows(name), *info.shape), dtype=info.dtype, device=device)

    def signature(self) -> Any:
        """What decides the graph besides the model: JSON values."""
        return {"capture": self.capture, "replace": self.replace}

    def covers(self, capture: Sequence[str], replace: Sequence[str]) -> bool:
        """Whether these names are part of the plan already."""
        return set(capture) <= set(self.capture) and set(replace) <= set(self.replace)

    def plan(self, num_tokens: int, num_sampled: int) -> TapPlan:
        """Return the plan of steps of one size; its tensors are the same in every step."""
        size = (num_tokens, num_sampled)
        if size not in self._plans:
            self._plans[size] = TapPlan(
                capture={name: self._cut(name, buffer, size) for name, buffer in self.buffers.items()},
                reference={name: self._cut(name, buffer, size) for name, buffer in self.references.items()},
                masks={name: self._cut(name, mask, size) for name, mask in self.masks.items()},
            )
        return self._plans[size]

    def context(self, num_tokens: int, num_sampled: int, *, sampled: bool) -> ReplacementContext:
        """Return the replaced sites of one kind of rows as a context that `TensorReplacer.fill` overwrites."""
        size = (num_tokens, num_sampled)
        if (size, sampled) not in self._contexts:
            plan = self.plan(*size)
            names = [name for name in self.replace if self.sites[name].sampled == sampled]
            self._contexts[size, sampled] = ReplacementContext(
                {name: plan.reference[name] for name in names},
                {name: plan.masks[name] for name in names},
                torch.zeros(num_sampled if sampled else num_tokens, dtype=torch.bool),
            )
        return self._contexts[size, sampled]

    def _cut(self, name: str, tensor: Tensor, size: Size) -> Tensor:
        rows = size[1] if self.sites[name].sampled else size[0]
        return tensor[:rows]

    def leave_live(self) -> None:
        """Replace nothing from now on, until masks are filled again."""
        for mask in self.masks.values():
            mask.zero_()

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Make the planned modules into sites inside the block: needed to trace the model or run it uncompiled."""
        with hooked(self.model, self._modules, self._places):
            yield

    @contextlib.contextmanager
    def active(self, num_tokens: int, num_sampled: int, *, hooks: bool = True) -> Iterator[None]:
        """Record and replace inside the block.

        Args:
            num_tokens, num_sampled: rows of the step.
            hooks: also install the hooks; a compiled graph has no need of them.
        """
        with self.hooks() if hooks else contextlib.nullcontext(), active(self.plan(num_tokens, num_sampled)):
            yield

    def rows(self, name: str, num_tokens: int, num_sampled: int) -> Tensor:
        """Return what the last step recorded at a site, its first rows: a view that the next step overwrites."""
        return self.buffers[name][: num_sampled if self.sites[name].sampled else num_tokens]
