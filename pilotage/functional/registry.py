"""One operator, one definition, and a record of what ran instead.

An operator is a plain-torch function: its definition, its fallback and its golden. Faster implementations register with
a domain (which calls they are correct for) and a priority. The choice depends only on dtypes, shapes, devices and
options, never on values, so it is made once while a graph is traced and leaves nothing in the compiled graph.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from pilotage.core.errors import ConfigError, Unsupported

P = ParamSpec("P")
R = TypeVar("R")

DEFINITION = "torch"
_OFF = ("1", "true", "yes", "on")


class TensorSpec(NamedTuple):
    """What a domain may know of a tensor argument."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    requires_grad: bool


@dataclass(frozen=True)
class Call:
    """The facts a domain decides on: every argument by name, tensors as `TensorSpec`, defaults filled in."""

    operator: str
    arguments: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        return {name: value for name, value in self.arguments.items() if isinstance(value, TensorSpec)}

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


Domain = Callable[[Call], str | None]


class Implementation(NamedTuple):
    """One way to compute an operator. `domain` returns None for "mine", or the reason why not."""

    name: str
    function: Callable[..., Any]
    domain: Domain
    priority: int


class Choice(NamedTuple):
    """What was chosen for a call and why the others were not."""

    implementation: str
    reason: str
    refused: tuple[tuple[str, str], ...]


_OPERATORS: dict[str, dict[str, Implementation]] = {}
_SIGNATURES: dict[str, inspect.Signature] = {}
_FORCED: dict[str, str] = {}
_RECEIPT: Counter[tuple[str, Choice]] = Counter()


def kernels_disabled() -> bool:
    """Tell whether the environment switches every implementation but the definitions off."""
    names = ("PILOTAGE_DISABLE_KERNELS", "VLLM_NEURON_DISABLE_KERNELS")
    return any(os.environ.get(name, "").lower() in _OFF for name in names)


def operator(definition: Callable[P, R]) -> Callable[P, R]:
    """Make `definition` an operator: the same signature, dispatched to the best implementation registered for it."""
    name = definition.__name__
    _OPERATORS[name] = {DEFINITION: Implementation(DEFINITION, definition, lambda call: None, 0)}
    _SIGNATURES[name] = inspect.signature(definition)
    implementations = _OPERATORS[name]

    @functools.wraps(definition)
    def dispatched(*args: P.args, **kwargs: P.kwargs) -> R:
        names = tuple(kwargs)
        values = tuple([_describe(value) for value in args] + [_describe(value) for value in kwargs.values()])
        result: R = implementations[_choose(name, values, names)].function(*args, **kwargs)
        return result

    return dispatched


def register(
    operator: str, name: str, function: Callable[..., Any], *, domain: Domain, priority: int
) -> Implementation:
    """Offer another implementation of an operator.

    Args:
        operator: name of the operator, e.g. "attention_decode".
        name: name of the implementation, as the receipt prints it.
        function: called with exactly the arguments that the caller gave; must agree with the definition.
        domain: given the `Call`, returns None where the function is correct and fast, else the reason in words.
        priority: the highest one whose domain accepts is taken; the definition has 0.

    Raises:
        ConfigError: no such operator, or the name is taken.

    A graph that is already compiled keeps the implementation it was traced with.
    """
    if operator not in _OPERATORS:
        raise ConfigError(
            f"no operator named {operator!r}", where="register", do=f"use one of {', '.join(sorted(_OPERATORS))}"
        )
    if name in _OPERATORS[operator]:
        raise ConfigError(f"{name!r} is already registered", where=f"functional.{operator}", do="choose another name")
    implementation = Implementation(name, function, domain, priority)
    _OPERATORS[operator][name] = implementation
    _decide.cache_clear()
    return implementation


@contextlib.contextmanager
def forced(choices: Mapping[str, str]) -> Iterator[None]:
    """Take the named implementations inside the block, e.g. `forced({"rms_norm": "torch"})`, or fail; for comparisons.

    Raises:
        ConfigError: an operator or implementation that does not exist.
        Unsupported: raised at the call if the named implementation refuses it.
    """
    for operator_name, implementation in choices.items():
        if implementation not in _OPERATORS.get(operator_name, {}):
            raise ConfigError(f"no implementation {implementation!r}", where=f"functional.{operator_name}")
    before = dict(_FORCED)
    _FORCED.update(choices)
    try:
        yield
    finally:
        _FORCED.clear()
        _FORCED.update(before)


def explain(operator: str | None = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Say what would run and why.

    Args:
        operator: an operator's name; None lists every operator with its implementations, best first.
        args, kwargs: the arguments of a call to judge; without any, only the implementations are listed.

    Returns:
        `{operator: [names]}`, or `{"operator", "implementation", "reason", "refused": {name: reason}}`.
    """
    if operator is None:
        return {name: [one.name for one in _by_priority(name)] for name in sorted(_OPERATORS)}
    if operator not in _OPERATORS:
        raise ConfigError(f"no operator named {operator!r}", where="explain")
    if not args and not kwargs:
        return {operator: [one.name for one in _by_priority(operator)]}
    values = tuple(_describe(value) for value in (*args, *kwargs.values()))
    choice = _decide(operator, values, tuple(kwargs), _FORCED.get(operator), kernels_disabled())
    return {
        "operator": operator,
        "implementation": choice.implementation,
        "reason": choice.reason,
        "refused": dict(choice.refused),
    }


def receipt() -> dict[str, list[dict[str, Any]]]:
    """Report what ran since `reset_receipt`: per operator each implementation, how often it was chosen, and why.

    A compiled graph chooses while it is traced: its `selections` count call sites, not calls.
    """
    out: dict[str, list[dict[str, Any]]] = {}
    for (name, choice), selections in sorted(_RECEIPT.items(), key=lambda item: (item[0][0], -item[1])):
        out.setdefault(name, []).append(
            {
                "implementation": choice.implementation,
                "selections": selections,
                "reason": choice.reason,
                "refused": dict(choice.refused),
            }
        )
    return out


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Leave what runs inside the block out of the receipt."""
    before = _RECEIPT.copy()
    try:
        yield
    finally:
        _RECEIPT.clear()
        _RECEIPT.update(before)


def reset_receipt() -> None:
    """Forget what ran so far."""
    _RECEIPT.clear()


def _by_priority(name: str) -> list[Implementation]:
    return sorted(_OPERATORS[name].values(), key=lambda one: -one.priority)


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        wants_grad = value.requires_grad and torch.is_grad_enabled()
        return ("tensor", value.dtype, tuple(value.shape), value.device.type, wants_grad)
    return value


@torch.compiler.assume_constant_result
def _choose(name: str, values: tuple[Any, ...], keywords: tuple[str, ...]) -> str:
    """Choose, and record the choice. Dynamo calls this while tracing and keeps only the answer."""
    choice = _decide(name, values, keywords, _FORCED.get(name), kernels_disabled())
    _RECEIPT[(name, choice)] += 1
    return choice.implementation


@functools.lru_cache(maxsize=4096)
def _decide(
    name: str, values: tuple[Hashable, ...], keywords: tuple[str, ...], forced: str | None, off: bool
) -> Choice:
    call = _call(name, values, keywords)
    if forced is not None:
        reason = _OPERATORS[name][forced].domain(call)
        if reason is not None:
            raise Unsupported(f"{forced!r} was asked for, and {reason}", where=f"functional.{name}")
        return Choice(forced, "asked for", ())
    refused: list[tuple[str, str]] = []
    for one in _by_priority(name):
        if off and one.name != DEFINITION:
            refused.append((one.name, "kernels are switched off by the environment"))
            continue
        reason = one.domain(call)
        if reason is None:
            why = "highest priority that accepts" if one.name != DEFINITION else "nothing faster accepts"
            if len(_OPERATORS[name]) == 1:
                why = "the only implementation"
            return Choice(one.name, why, tuple(refused))
        refused.append((one.name, reason))
    raise Unsupported("no implementation accepts this call", where=f"functional.{name}")


def _call(name: str, values: tuple[Any, ...], keywords: tuple[str, ...]) -> Call:
    specs = [
        TensorSpec(*value[1:]) if isinstance(value, tuple) and value[:1] == ("tensor",) else value for value in values
    ]
    positional = len(specs) - len(keywords)
    named = dict(zip(keywords, specs[positional:], strict=True))
    bound = _SIGNATURES[name].bind(*specs[:positional], **named)
    bound.apply_defaults()
    return Call(name, dict(bound.arguments))
