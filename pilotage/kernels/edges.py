"""The calls that a check makes: the usual one, odd sizes, every option, and the edges of the domain on both sides."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pilotage.core.errors import BadInput
from pilotage.functional import layout, registry
from pilotage.functional.domain import Domain, Limit
from pilotage.functional.registry import Implementation
from pilotage.kernels import cases
from pilotage.kernels.cases import Case
from pilotage.kernels.table import short

OF_AN_OPTION = 2  # the seed of calls in which one option differs from the usual
_LARGEST = 1 << 22  # elements of one tensor: an edge that takes more is not walked to
_SIZES: dict[str, tuple[int, ...]] = {
    "T": (1, 17, 130),
    "D": (33, 128, 200),
    "F": (33, 130),
    "H": (20, 64, 128),
    "C": (8, 32),
    "M": (1, 9),
    "E": (4, 16),
    "V": (130,),
    "J": (5,),
    "L": (33,),
    "B": (1,),
    "R": (16,),
}
_TOGETHER = ({"N": 4, "K": 4}, {"N": 6, "K": 1}, {"N": 6, "K": 2})  # ratios of query heads to key heads


def plan(
    operator: str, one: Implementation, dtype: torch.dtype, dims: Mapping[str, int], device: str = "cpu"
) -> list[Case]:
    """Return the calls to make, the usual one first.

    Args:
        dims: letters of the usual call that are not the default.
    """
    out: list[Case] = []
    seen: set[str] = set()
    for label, own, options, optional, seed in _variants(operator, one, dims):
        label = f"{label}, {short(dtype)}"
        if label in seen:
            continue
        seen.add(label)
        try:
            case = cases.build(
                operator,
                {**dims, **own},
                dtype,
                options=options,
                optional=optional,
                seed=seed,
                device=device,
                label=label,
            )
        except BadInput:  # sizes that make no call, e.g. more tokens than pages
            continue
        out.append(case)
    return [*out, _strided(out[0])] if out else []


Variant = tuple[str, dict[str, int], dict[str, Any], tuple[str, ...], int]


def _variants(operator: str, one: Implementation, dims: Mapping[str, int]) -> Iterator[Variant]:
    tensors = registry.layout_of(operator)
    letters = layout.all_letters(tensors)
    parameters = registry.signature_of(operator).parameters
    yield "usual", {}, {}, (), 0
    yield "other numbers", {}, {}, (), 1
    for name, values in registry.examples_of(operator).items():
        for value in values:
            yield f"{name}={value}", {}, {name: value}, (), OF_AN_OPTION
    optional = tuple(
        name
        for name in tensors
        if parameters[name].default is not parameters[name].empty and name not in ("k_scale", "v_scale")
    )
    if optional:
        yield f"with {', '.join(optional)}", {}, {}, optional, 3
    for letter in _SIZES.keys() & letters:
        for size in _SIZES[letter]:
            yield f"{letter}={size}", {letter: size}, {}, (), 4
    if {"N", "K"} <= letters:
        for sizes in _TOGETHER:
            yield ", ".join(f"{letter}={size}" for letter, size in sizes.items()), dict(sizes), {}, (), 5
    if isinstance(one.domain, Domain):
        for what, limit in (*one.domain.limits.items(), *one.domain.worth.items()):
            for own in _at_the_edges(what, limit, cases.complete(operator, dims)):
                if _elements(operator, {**dims, **own}) <= _LARGEST:
                    yield ", ".join(f"{letter}={size}" for letter, size in own.items()), own, {}, (), 6
        for name, values in one.domain.options.items():
            for value in values:
                if name not in tensors:
                    yield f"{name}={value}", {}, {name: value}, (), OF_AN_OPTION


def _at_the_edges(what: str, limit: Limit, dims: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield letters for which an expression has the values at a limit's edges."""
    letters = sorted(layout.letters(what))
    if re.fullmatch(r"[A-Z]", what):
        for value in limit.edges():
            yield {what: value}
    elif (quotient := re.fullmatch(r"([A-Z]) *// *([A-Z])", what)) is not None:
        for value in limit.edges():
            yield {quotient[1]: value * dims[quotient[2]], quotient[2]: dims[quotient[2]]}
    elif len(letters) == 1 and letters[0] in dims:
        wanted = set(limit.edges())
        found: dict[int, int] = {}
        for size in range(1, 4097):
            at = layout.evaluate(what, {letters[0]: size})
            if at in wanted:
                found.setdefault(at, size)
        for size in found.values():
            yield {letters[0]: size}


def _elements(operator: str, dims: Mapping[str, int]) -> int:
    all_dims = cases.complete(operator, dims)
    largest = 0
    for words in registry.layout_of(operator).values():
        size = 1
        try:
            for length in layout.shape(words, {**all_dims, "skip": 8}):
                size *= length
        except BadInput:
            continue
        largest = max(largest, size)
    return largest


def _strided(case: Case) -> Case:
    """Return the same call with activations that are views into wider rows, as the parts of a fused product are."""
    arguments = dict(case.arguments)
    for name, value in arguments.items():
        if not isinstance(value, Tensor) or value.ndim < 2 or not value.is_floating_point() or not value.shape[-1]:
            continue
        if "weight" in name or "cache" in name or value.element_size() == 1:
            continue
        wide = value.new_full((*value.shape[:-1], value.shape[-1] + 8), float("nan"))
        wide[..., : value.shape[-1]] = value
        arguments[name] = wide[..., : value.shape[-1]]
    return Case(
        operator=case.operator,
        dims=case.dims,
        dtype=case.dtype,
        arguments=arguments,
        rows=case.rows,
        label=case.label.replace("usual", "rows apart"),
    )
