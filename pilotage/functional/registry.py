"""One operator, one definition, and what runs instead.

An operator is a plain-torch function: its definition, its fallback and its golden. Faster implementations register with
a domain (which calls they are correct for) and a priority. The choice depends only on dtypes, shapes, devices and
options, never on values, so it is made once while a graph is traced and leaves nothing in the compiled graph.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from pilotage.core.environment import switched_on
from pilotage.core.errors import ConfigError, Unsupported
from pilotage.functional.call import Call, facts, spec_of
from pilotage.functional.domain import FALLBACKS, OUTSIDE, Domain, Refusal
from pilotage.functional.receipts import Choice, record

P = ParamSpec("P")
R = TypeVar("R")

DEFINITION = "torch"
_OFF_NAMES = ("PILOTAGE_DISABLE_KERNELS", "VLLM_NEURON_DISABLE_KERNELS")
_SWITCHES = (*_OFF_NAMES, "NKI_SIMULATOR", "TRITON_INTERPRET")  # a choice holds while these are as they were


class Implementation(NamedTuple):
    """One way to compute an operator.

    Attributes:
        domain: a `Domain`, or a function that returns None for "mine", or the reason why not.
        language: what it is written in: torch, C++, NKI, Triton.
        notes: limits in words that the domain does not express.
    """

    name: str
    function: Callable[..., Any]
    domain: Domain | Callable[[Call], str | None]
    priority: int
    language: str = "torch"
    notes: str = ""

    def judge(self, call: Call) -> Refusal | None:
        """Return why it does not take a call here and now, or None."""
        if isinstance(self.domain, Domain):
            return self.domain.judge(call)
        words = self.domain(call)
        return None if words is None else Refusal(OUTSIDE, words)


class Described(NamedTuple):
    """What is known of an operator's arguments: the layout of its tensors, and values of options worth trying."""

    layout: Mapping[str, str]
    examples: Mapping[str, tuple[Any, ...]]


_OPERATORS: dict[str, dict[str, Implementation]] = {}
_DESCRIBED: dict[str, Described] = {}
_SIGNATURES: dict[str, inspect.Signature] = {}
_FORCED: dict[str, str] = {}


def kernels_disabled() -> bool:
    """Tell whether the environment switches every implementation but the definitions off."""
    return switched_on(_OFF_NAMES) is not None


def operator(definition: Callable[P, R]) -> Callable[P, R]:
    """Make `definition` an operator: the same signature, dispatched to the best implementation registered for it."""
    name = definition.__name__
    everywhere = Domain(gradient=True, sharding="that of its torch operators")
    _OPERATORS[name] = {DEFINITION: Implementation(DEFINITION, definition, everywhere, 0)}
    _SIGNATURES[name] = inspect.signature(definition)
    implementations = _OPERATORS[name]

    @functools.wraps(definition)
    def dispatched(*args: P.args, **kwargs: P.kwargs) -> R:
        names = tuple(kwargs)
        values = tuple([facts(value) for value in args] + [facts(value) for value in kwargs.values()])
        result: R = implementations[_choose(name, values, names)].function(*args, **kwargs)
        return result

    return dispatched


def describe(operator: str, tensors: Mapping[str, str], **examples: tuple[Any, ...]) -> None:
    """Say how an operator's tensors are laid out, and which values its other arguments may take.

    Domains state limits in these letters; `pilotage kernels explain` and `check` make arguments from them.

    Args:
        operator: its name.
        tensors: tensor argument -> layout, e.g. {"x": "... D", "weight": "D"}; see `functional.layout`.
        examples: argument -> values worth trying, the first of them where one has to do.

    Raises:
        ConfigError: an operator or argument that does not exist.
    """
    _require(operator, "describe")
    unknown = [name for name in (*tensors, *examples) if name not in _SIGNATURES[operator].parameters]
    if unknown:
        raise ConfigError(
            f"no argument named {unknown[0]!r}",
            where=f"functional.{operator}",
            do=f"its arguments are {', '.join(_SIGNATURES[operator].parameters)}",
        )
    _DESCRIBED[operator] = Described(dict(tensors), dict(examples))
    _decide.cache_clear()


def layout_of(operator: str) -> Mapping[str, str]:
    """Return the layout of each tensor argument; empty if nothing was said of them."""
    return _DESCRIBED[operator].layout if operator in _DESCRIBED else {}


def examples_of(operator: str) -> Mapping[str, tuple[Any, ...]]:
    """Return the values worth trying of each option."""
    return _DESCRIBED[operator].examples if operator in _DESCRIBED else {}


def operators() -> list[str]:
    """Return the names of all operators."""
    return sorted(_OPERATORS)


def implementations(operator: str) -> list[Implementation]:
    """Return the implementations of an operator, the one to be asked first first.

    Raises:
        ConfigError: no such operator.
    """
    _require(operator, "implementations")
    return sorted(_OPERATORS[operator].values(), key=lambda one: -one.priority)


def signature_of(operator: str) -> inspect.Signature:
    """Return the signature that all implementations of an operator share."""
    _require(operator, "signature_of")
    return _SIGNATURES[operator]


def register(
    operator: str,
    name: str,
    function: Callable[..., Any],
    *,
    domain: Domain | Callable[[Call], str | None],
    priority: int,
    language: str = "torch",
    notes: str = "",
) -> Implementation:
    """Offer another implementation of an operator.

    Args:
        operator: name of the operator, e.g. "attention_decode".
        name: name of the implementation, as the receipt prints it.
        function: called with exactly the arguments that the caller gave; must agree with the definition.
        domain: where the function is correct and fast, as a `Domain`; or a function of the `Call` that returns None
            there and else the reason in words.
        priority: the highest one whose domain accepts is taken; the definition has 0.
        language: what it is written in: torch, C++, NKI, Triton.
        notes: its limits in words, where the domain does not express them.

    Raises:
        ConfigError: no such operator, or the name is taken.

    A graph that is already compiled keeps the implementation it was traced with.
    """
    _require(operator, "register")
    if name in _OPERATORS[operator]:
        raise ConfigError(f"{name!r} is already registered", where=f"functional.{operator}", do="choose another name")
    implementation = Implementation(name, function, domain, priority, language, notes)
    _OPERATORS[operator][name] = implementation
    _decide.cache_clear()
    return implementation


def picking(operator: str, kernel: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """Return an implementation that gives `kernel` the named arguments of an operator, in this order.

    What a caller leaves out has the operator's default, so its signature is written down once: where it is defined.

    Raises:
        ConfigError: no such operator or argument.
    """
    parameters = signature_of(operator).parameters
    unknown = [name for name in names if name not in parameters]
    if unknown:
        raise ConfigError(f"no argument named {unknown[0]!r}", where=f"functional.{operator}", do=", ".join(parameters))
    order = [item.name for item in parameters.values() if item.kind is not item.KEYWORD_ONLY]
    defaults = {item.name: item.default for item in parameters.values() if item.default is not item.empty}

    def picked(*args: Any, **kwargs: Any) -> Any:
        given = {**defaults, **dict(zip(order, args, strict=False)), **kwargs}
        return kernel(*[given[name] for name in names])

    return picked


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
        `{operator: [names]}`, or `{"operator", "implementation", "reason", "refused": {name: reason}, "fallback"}`.
    """
    if operator is None:
        return {name: [one.name for one in implementations(name)] for name in operators()}
    _require(operator, "explain")
    if not args and not kwargs:
        return {operator: [one.name for one in implementations(operator)]}
    values = tuple(facts(value) for value in (*args, *kwargs.values()))
    choice = _decide(operator, values, tuple(kwargs), _FORCED.get(operator), _switches())
    return {
        "operator": operator,
        "implementation": choice.implementation,
        "reason": choice.reason,
        "refused": dict(choice.refused),
        "fallback": choice.fallback,
    }


def _require(operator: str, where: str) -> None:
    if operator not in _OPERATORS:
        near = difflib.get_close_matches(operator, _OPERATORS, n=1)
        hint = f"is it {near[0]}? all are" if near else "use one of"
        raise ConfigError(f"no operator named {operator!r}", where=where, do=f"{hint} {', '.join(operators())}")


def _switches() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in _SWITCHES)


@torch.compiler.assume_constant_result
def _choose(name: str, values: tuple[Any, ...], keywords: tuple[str, ...]) -> str:
    """Choose, and record the choice. Dynamo calls this while tracing and keeps only the answer."""
    choice = _decide(name, values, keywords, _FORCED.get(name), _switches())
    record(name, choice)
    return choice.implementation


@functools.lru_cache(maxsize=4096)
def _decide(
    name: str,
    values: tuple[Hashable, ...],
    keywords: tuple[str, ...],
    forced: str | None,
    switches: tuple[str | None, ...],
) -> Choice:
    """Choose. `switches` is only part of the key: domains read the environment themselves."""
    call = _call(name, values, keywords)
    if forced is not None:
        refusal = _OPERATORS[name][forced].judge(call)
        if refusal is not None:
            raise Unsupported(f"{forced!r} was asked for, and {refusal.words}", where=f"functional.{name}")
        return Choice(forced, "asked for", ())
    refused: list[tuple[str, str]] = []
    fallback = False
    off = kernels_disabled()
    for one in implementations(name):
        if off and one.name != DEFINITION:
            refused.append((one.name, "kernels are switched off by the environment"))
            continue
        refusal = one.judge(call)
        if refusal is None:
            why = "highest priority that accepts" if one.name != DEFINITION else "nothing faster accepts"
            if len(_OPERATORS[name]) == 1:
                why = "the only implementation"
            return Choice(one.name, why, tuple(refused), fallback)
        refused.append((one.name, refusal.words))
        fallback = fallback or refusal.kind in FALLBACKS
    raise Unsupported("no implementation accepts this call", where=f"functional.{name}")


def call_of(operator: str, *args: Any, **kwargs: Any) -> Call:
    """Return the facts of a call that is not made; a `TensorSpec` stands for a tensor."""
    _require(operator, "call_of")
    return _call(operator, tuple(facts(value) for value in (*args, *kwargs.values())), tuple(kwargs))


def _call(name: str, values: tuple[Any, ...], keywords: tuple[str, ...]) -> Call:
    specs = [spec_of(value) for value in values]
    positional = len(specs) - len(keywords)
    named = dict(zip(keywords, specs[positional:], strict=True))
    bound = _SIGNATURES[name].bind(*specs[:positional], **named)
    bound.apply_defaults()
    return Call(name, dict(bound.arguments), layout_of(name))
