"""The table of all implementations, and which of them would run for a call on a target, here or elsewhere."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pilotage.core.errors import BadInput
from pilotage.core.targets import TARGETS, devices_of
from pilotage.functional import layout, registry
from pilotage.functional.call import Call
from pilotage.functional.domain import Domain, Refusal
from pilotage.functional.registry import DEFINITION, Implementation
from pilotage.kernels import cases


def load(files: Sequence[Path]) -> None:
    """Run Python files that register implementations or define operators.

    Raises:
        BadInput: a file that is not there or raises.
    """
    for file in files:
        if not file.is_file():
            raise BadInput("no such file", where=str(file), do="name a Python file that registers implementations")
        sys.path.insert(0, str(file.resolve().parent))  # as if it were run: it may import what lies beside it
        try:
            runpy.run_path(str(file), run_name=f"pilotage_loaded_{file.stem}")
        except Exception as error:
            raise BadInput(f"{type(error).__name__}: {error}", where=str(file), do="correct the file") from error
        finally:
            sys.path.remove(str(file.resolve().parent))


def rows(operator: str | None = None) -> list[dict[str, Any]]:
    """Return the table: operator, implementation and its domain in words, the one asked first first."""
    names = registry.operators() if operator is None else [operator]
    return [_row(name, one) for name in names for one in registry.implementations(name)]


def _row(operator: str, one: Implementation) -> dict[str, Any]:
    row: dict[str, Any] = {
        "operator": operator,
        "implementation": one.name,
        "language": one.language,
        "priority": one.priority,
    }
    domain = one.domain
    if not isinstance(domain, Domain):
        return row | {
            "targets": [],
            "dtypes": [],
            "limits": ["decided by a function"],
            "gradient": False,
            "sharding": None,
            "here": None,
            "notes": one.notes,
        }
    return row | {
        "targets": list(domain.targets) or ["any"],
        "dtypes": [short(dtype) for dtype in domain.dtypes] or ["any"],
        "limits": domain.describe(),
        "gradient": domain.gradient,
        "sharding": None if domain.sharding is None else str(domain.sharding),
        "here": _missing(domain),
        "notes": one.notes,
    }


def _missing(domain: Domain) -> str | None:
    """Return why an implementation cannot run on this machine for any call, or None."""
    devices = devices_of(domain.targets)
    present = {"cpu"} | ({"cuda"} if torch.cuda.is_available() else set())
    if devices and not devices & present:
        if domain.emulator is None:
            return f"no {' or '.join(domain.targets)} device"
        if not domain.emulator.active():
            return f"no {' or '.join(domain.targets)} device; {domain.emulator.how} runs it in {domain.emulator.name}"
    return domain.machine() if domain.machine is not None else None


def explain(operator: str, call: Call, target: str) -> list[dict[str, Any]]:
    """Judge a call on a target for every implementation, in the order in which they are asked.

    Args:
        call: with the target's device.
        target: "cpu", "cuda" or "neuron".

    Returns:
        Rows with "implementation", "language", "priority", "verdict" ("runs", "would run", "refuses"), "why", and
        "here": what this machine lacks, if it is a reason.
    """
    out = []
    taken = False
    disabled = registry.kernels_disabled()
    for one in registry.implementations(operator):
        domain = one.domain
        if disabled and one.name != DEFINITION:
            refusal: Refusal | None = Refusal("off", "kernels are switched off by the environment")
        else:
            refusal = domain.judge(call, here=False) if isinstance(domain, Domain) else one.judge(call)
        here = _missing(domain) if isinstance(domain, Domain) else None
        lacking = here is not None and _is_here(target)
        if refusal is not None:
            verdict, why = "refuses", refusal.words
        elif lacking:
            verdict, why = "refuses", str(here)
        elif taken:
            verdict, why = "would accept", "one of higher priority accepts"
        else:
            why = "highest priority that accepts" if one.name != DEFINITION else "nothing faster accepts"
            verdict, taken = "runs", True
        out.append(
            {
                "implementation": one.name,
                "language": one.language,
                "priority": one.priority,
                "verdict": verdict,
                "why": why,
                "here": here,
            }
        )
    return out


def _is_here(target: str) -> bool:
    return target == "cpu" or (target == "cuda" and torch.cuda.is_available())


def call_for(
    operator: str,
    *,
    shapes: Sequence[str] = (),
    dims: Sequence[str] = (),
    dtypes: Sequence[str] = ("bf16",),
    options: Sequence[str] = (),
    target: str = "cpu",
) -> Call:
    """Make the facts of a call from words.

    Args:
        shapes: "17,2048" of the first tensor, or "weight=2048" of a named one, which is then given if optional.
        dims: "N=8,K=2": letters of core/shapes.md. What neither says has a usual value.
        dtypes: "bf16" of all float tensors, or "k_cache=fp8" of one.
        options: "window=128", "activation=gelu".
        target: whose device the tensors are on.

    Raises:
        BadInput: words that cannot be read, or shapes that do not fit together.
        ConfigError: no such operator.
    """
    parameters = registry.signature_of(operator).parameters
    tensors = registry.layout_of(operator)
    if target not in TARGETS:
        raise BadInput(f"no target named {target!r}", where="--target", do=f"use one of {', '.join(TARGETS)}")
    if not tensors:
        raise BadInput("nothing is known of its tensors", where=operator, do="describe(...) it where it is defined")
    given: dict[str, tuple[int, ...]] = {}
    for text in shapes:
        name, _, sizes = text.rpartition("=")
        name = name or next(iter(tensors))
        if name not in tensors:
            raise BadInput(f"no tensor named {name!r}", where="--shape", do=f"its tensors are {', '.join(tensors)}")
        given[name] = tuple(_integer(size, "--shape") for size in sizes.split(",") if size)
    values = parse_options(operator, options)
    numbers = {name: value for name, value in values.items() if type(value) is int}
    known, conflicts = layout.bind(tensors, given, {**numbers, **parse_dims(dims)})
    if conflicts:
        layouts = ", ".join(f"{name} [{words}]" for name, words in tensors.items())
        raise BadInput(conflicts[0], where=operator, do=f"shapes are {layouts}")
    all_dims = cases.complete(operator, {name: value for name, value in known.items() if name not in numbers})
    default, single = _dtypes(operator, dtypes)
    arguments = cases.specs(
        operator,
        all_dims,
        default,
        options=values,
        dtypes=single,
        optional=[name for name in (*given, *single) if parameters[name].default is not parameters[name].empty],
        device=target,
    )
    for name, shape in given.items():  # leading dimensions as they were given, not flattened
        arguments[name] = arguments[name]._replace(shape=shape)
    return registry.call_of(operator, **arguments)


def parse_dims(texts: Sequence[str]) -> dict[str, int]:
    """Read "N=8,K=2"."""
    out = {}
    for text in texts:
        for part in filter(None, text.replace(" ", ",").split(",")):
            name, equals, value = part.partition("=")
            if not equals:
                raise BadInput(f"{part!r} is not LETTER=NUMBER", where="--dims", do="e.g. --dims N=8,K=2,H=128")
            out[name] = _integer(value, "--dims")
    return out


def parse_dtype(text: str) -> torch.dtype:
    """Read "bf16"."""
    if text not in cases.DTYPES:
        raise BadInput(f"no dtype named {text!r}", where="--dtype", do=f"use one of {', '.join(cases.DTYPES)}")
    return cases.DTYPES[text]


def _dtypes(operator: str, texts: Sequence[str]) -> tuple[torch.dtype, dict[str, torch.dtype]]:
    default, single = torch.bfloat16, {}
    for text in texts:
        name, _, value = text.rpartition("=")
        if not name:
            default = parse_dtype(value)
        elif name in registry.layout_of(operator):
            single[name] = parse_dtype(value)
        else:
            raise BadInput(f"no tensor named {name!r}", where="--dtype", do=", ".join(registry.layout_of(operator)))
    return default, single


def parse_options(operator: str, texts: Sequence[str]) -> dict[str, Any]:
    """Read "window=128" for an operator."""
    parameters, tensors = registry.signature_of(operator).parameters, registry.layout_of(operator)
    allowed = [name for name in parameters if name not in tensors]
    out = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in allowed:
            raise BadInput(f"{text!r} is no option of it", where="--option", do=f"its options are {', '.join(allowed)}")
        out[name] = parse_literal(value)
    return out


def parse_literal(text: str) -> Any:
    """Read a number, true, false, none, a comma list of them, or a word."""
    words: Mapping[str, Any] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    if "," in text:
        return tuple(parse_literal(part) for part in text.split(",") if part)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _integer(text: str, where: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise BadInput(f"{text!r} is no number", where=where, do="e.g. --shape 17,2048") from error


def short(dtype: torch.dtype) -> str:
    """Name a dtype as the command line does."""
    return next((name for name, value in cases.DTYPES.items() if value == dtype), str(dtype).removeprefix("torch."))
