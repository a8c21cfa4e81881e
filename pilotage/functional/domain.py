"""The domain of an implementation, as data: which calls it is correct for, where it runs, and what it lacks.

As data it can be judged for a machine that is not here, listed, and walked along its edges by a check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pilotage.core.errors import ConfigError
from pilotage.core.targets import TARGETS, devices_of
from pilotage.functional import layout
from pilotage.kernels.sharding import Sharding

if TYPE_CHECKING:
    from pilotage.functional.call import Call

# The kinds of a refusal. The first two are fallbacks: an implementation that is made for this device is passed over.
OUTSIDE = "outside"  # of what it is correct for
MISSING = "missing"  # something it needs on this machine
ELSEWHERE = "elsewhere"  # made for another device
NO_GRADIENT = "no gradient"
NOT_WORTH = "not worth it"  # correct, and something else is as fast
FALLBACKS = (OUTSIDE, MISSING)


class Refusal(NamedTuple):
    """Why an implementation does not take a call."""

    kind: str
    words: str


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Bounds of a number.

    Attributes:
        at_least, at_most: both inclusive; None for no bound.
        multiple_of: what it has to be divisible by.
        why: the reason, where the number alone does not say it.
    """

    at_least: int | None = None
    at_most: int | None = None
    multiple_of: int = 1
    why: str = ""

    def allows(self, value: int) -> bool:
        """Tell whether a value is within the bounds."""
        over = self.at_most is not None and value > self.at_most
        under = self.at_least is not None and value < self.at_least
        return not (over or under or value % self.multiple_of)

    def edges(self) -> list[int]:
        """Return the values at the bounds and next to them on both sides."""
        out = set()
        for bound in (self.at_least, self.at_most):
            if bound is not None:
                out |= {bound - self.multiple_of, bound, bound + self.multiple_of}
        if self.multiple_of > 1:
            start = self.at_least or self.multiple_of
            out |= {start, start + self.multiple_of, start + self.multiple_of + 1}
        return sorted(value for value in out if value > 0)

    def __str__(self) -> str:
        parts = [f"<= {self.at_most}"] if self.at_most is not None else []
        parts += [f">= {self.at_least}"] if self.at_least is not None else []
        parts += [f"multiple of {self.multiple_of}"] if self.multiple_of > 1 else []
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Emulator:
    """What runs an implementation on the CPU that is made for another device.

    Attributes:
        name: in words.
        how: what switches it on.
        active: tells whether it is on.
        dtypes: float dtypes that it computes correctly; empty for all of the domain.
    """

    name: str
    how: str
    active: Callable[[], bool]
    dtypes: tuple[torch.dtype, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Domain:
    """The calls an implementation takes.

    Attributes:
        targets: "cpu", "cuda", "neuron"; empty for any device.
        dtypes: of its float tensors; empty for any.
        one_dtype: names of tensors that have to share one dtype.
        limits: expression of dimensions (core/shapes.md) -> bounds within which it is correct.
        worth: the same for what is correct outside as well, but not faster than what comes next.
        options: argument -> the values it takes.
        gradient: whether autograd goes through it.
        sharding: its rule for tensors that are divided over ranks (DTensor), as its kernel has it, or in words; None if
            it has none: such tensors are refused.
        error: what it may err, in the error of the definition in the same dtype.
        hides_non_finite: a NaN or infinity in an argument may come out as a finite number.
        emulator: runs it on the CPU if `targets` lacks that.
        other: given the `Call`, returns a reason against it that data cannot express, or None.
        machine: returns what this machine lacks, or None. Asked last, it may build something.
    """

    targets: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    one_dtype: tuple[str, ...] = ()
    limits: Mapping[str, Limit] = field(default_factory=dict)
    worth: Mapping[str, Limit] = field(default_factory=dict)
    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    gradient: bool = False
    sharding: Sharding | str | None = None
    error: float = 1.0
    hides_non_finite: bool = False
    emulator: Emulator | None = None
    other: Callable[[Call], str | None] | None = None
    machine: Callable[[], str | None] | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.targets if name not in TARGETS]
        if unknown:
            raise ConfigError(
                f"no target named {unknown[0]!r}", where="Domain(targets=)", do=f"use {', '.join(TARGETS)}"
            )

    def __call__(self, call: Call) -> str | None:
        """Return None for "mine", or the reason why not, in words."""
        refusal = self.judge(call)
        return None if refusal is None else refusal.words

    def judge(self, call: Call, *, here: bool = True, worth: bool = True) -> Refusal | None:
        """Judge a call.

        Args:
            call: its facts.
            here: whether this machine has to have what it needs; False for what would happen on another one.
            worth: whether it also has to be the faster choice.
        """
        emulated = False
        for name, spec in call.tensors.items():
            if not self.targets or spec.device in devices_of(self.targets):
                continue
            emulated = spec.device == "cpu" and self.emulator is not None and self.emulator.active()
            if not emulated:
                hint = ""
                if self.emulator is not None and spec.device == "cpu":
                    hint = f" ({self.emulator.how} runs it in {self.emulator.name})"
                return Refusal(ELSEWHERE, f"{name} is on {spec.device}, not {' or '.join(self.targets)}{hint}")
        for reason in (self._dtype(call, emulated), self._option(call), self._limit(call, self.limits)):
            if reason is not None:
                return Refusal(OUTSIDE, reason)
        if self.other is not None and (reason := self.other(call)) is not None:
            return Refusal(OUTSIDE, reason)
        if not self.gradient:
            for name, spec in call.tensors.items():
                if spec.requires_grad:
                    return Refusal(NO_GRADIENT, f"{name} needs a gradient")
        if self.sharding is None:
            for name, spec in call.tensors.items():
                if spec.divided:
                    return Refusal(OUTSIDE, f"{name} is divided over ranks, and there is no sharding rule")
        if worth and (reason := self._limit(call, self.worth)) is not None:
            return Refusal(NOT_WORTH, reason)
        if here and self.machine is not None and (reason := self.machine()) is not None:
            return Refusal(MISSING, reason)
        return None

    def describe(self) -> list[str]:
        """Return the limits in words, one a line."""
        out = [f"{what} {limit}" for what, limit in self.limits.items()]
        out += [f"{name} one of {', '.join(map(str, values))}" for name, values in self.options.items()]
        out += [f"{' and '.join(self.one_dtype)} of one dtype"] if self.one_dtype else []
        out += [
            f"only where {what} {limit}" + (f": {limit.why}" if limit.why else "") for what, limit in self.worth.items()
        ]
        out += [f"errs up to {self.error:g} times as much as the definition"] if self.error != 1 else []
        out += ["NaN and infinities may come out finite"] if self.hides_non_finite else []
        return out

    def _dtype(self, call: Call, emulated: bool) -> str | None:
        floats = {name: spec.dtype for name, spec in call.tensors.items() if spec.dtype.is_floating_point}
        for name, dtype in floats.items():
            if self.dtypes and dtype not in self.dtypes:
                return f"{name} is {dtype}"
            if emulated and self.emulator is not None and self.emulator.dtypes and dtype not in self.emulator.dtypes:
                return f"{name} is {dtype}, which {self.emulator.name} computes wrongly"
        held = {name: floats[name] for name in self.one_dtype if name in floats}
        if len(set(held.values())) > 1:
            return " and ".join(f"{name} is {dtype}" for name, dtype in held.items())
        return None

    def _option(self, call: Call) -> str | None:
        for name, values in self.options.items():
            value = call.arguments.get(name)
            if not any(value is allowed or value == allowed for allowed in values):
                shown = "a tensor" if name in call.tensors else repr(value)
                return f"{name} is {shown}, not {' or '.join(map(repr, values))}"
        return None

    def _limit(self, call: Call, limits: Mapping[str, Limit]) -> str | None:
        for what, limit in limits.items():
            value = layout.evaluate(what, call.dims)
            if value is None:
                return f"{what} is not known"
            if not limit.allows(value):
                return f"{what} is {value}, not {limit}" + (f": {limit.why}" if limit.why else "")
        return None
