"""`pilotage kernels estimate`: find an NKI kernel by name, make arguments of the given shapes, count what it does."""

from __future__ import annotations

import importlib
import inspect
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import pilotage.functional  # noqa: F401  the operators and our kernels register
from pilotage.core.errors import BadInput, PilotageError, Unsupported
from pilotage.functional import registry
from pilotage.kernels import cases, table
from pilotage.kernels.table import parse_literal

if TYPE_CHECKING:
    from pilotage.kernels.nki import Estimate

_INTEGERS = {"int32": torch.int32, "int64": torch.int64, "uint8": torch.uint8}


def estimate(
    name: str,
    *,
    shapes: Sequence[str] = (),
    dims: Sequence[str] = (),
    dtypes: Sequence[str] = ("bf16",),
    options: Sequence[str] = (),
    grid: int | None = None,
) -> Estimate:
    """Interpret one launch of a kernel and estimate its cost on a NeuronCore.

    Args:
        name: an operator that has an NKI kernel, or "file.py:kernel", or "package.module:kernel".
        shapes: "128,512" of the tensors in order, or "x=128,512" of a named one; of an operator, what is not given has
            a usual value.
        dims: "N=8,K=2" of an operator: letters of core/shapes.md.
        dtypes: "bf16" of all tensors, or "index=int32" of one.
        options: "eps=1e-6": arguments that are no tensors.
        grid: cores.

    Raises:
        BadInput: no such kernel, or arguments that it does not have or that are missing.
    """
    from pilotage.kernels import nki

    nki.install()
    if ":" not in name:
        return _of_operator(name, shapes, dims, dtypes, options, grid)
    if dims:
        raise BadInput("only an operator has letters", where="--dims", do="give each tensor: --shape x=128,512")
    kernel = find(name)
    arguments = _arguments(kernel, name, shapes, dtypes, options)
    try:
        return nki.estimate(kernel, [], grid, arguments)
    except PilotageError:
        raise
    except Exception as error:  # the kernel's own checks raise what they like
        raise BadInput(f"{type(error).__name__}: {error}", where=name, do="give shapes that it takes") from error


def _of_operator(
    name: str,
    shapes: Sequence[str],
    dims: Sequence[str],
    dtypes: Sequence[str],
    options: Sequence[str],
    grid: int | None,
) -> Estimate:
    """Estimate what the operator's own NKI kernel does for a call, with the arguments that a check would make."""
    from pilotage.kernels import nki

    ours = [one for operator in registry.operators() for one in _in_nki(operator) if operator == name]
    if not ours:
        having = [operator for operator in registry.operators() if _in_nki(operator)]
        raise BadInput(
            f"no operator with an NKI kernel is named {name!r}",
            where="estimate",
            do=f"use one of {', '.join(having)}, or file.py:kernel, or package.module:kernel",
        )
    if grid not in (None, 1):
        raise BadInput("our kernels run on one core", where="--grid", do="leave it out")
    call = table.call_for(name, shapes=shapes, dims=dims, dtypes=dtypes, options=options)
    given = [arg for arg in call.tensors if registry.signature_of(name).parameters[arg].default is None]
    first = next(spec.dtype for spec in call.tensors.values() if spec.dtype.is_floating_point)
    case = cases.build(
        name,
        {letter: size for letter, size in call.dims.items() if letter.isupper()},
        first,
        options=table.parse_options(name, options),
        optional=given,
    )
    refusal = ours[0].judge(case.call)
    if refusal is not None:
        raise BadInput(refusal.words, where=f"{name}, {ours[0].name}", do=f"pilotage kernels explain {name} says more")
    args, kwargs = case.split(case.arguments)
    with nki.watched() as launched, torch.no_grad():
        ours[0].function(*args, **kwargs)
    if len(launched) != 1:
        raise Unsupported(f"it launched {len(launched)} kernels", where=name, do="estimate them one by one")
    kernel, ledgers = launched[0]
    return nki.summarise(kernel, ledgers)


def _in_nki(operator: str) -> list[registry.Implementation]:
    return [one for one in registry.implementations(operator) if one.language == "NKI"]


def find(name: str) -> Callable[..., Any]:
    """Return the kernel behind "file.py:kernel" or "package.module:kernel".

    Raises:
        BadInput: there is none.
    """
    source, _, attribute = name.rpartition(":")
    try:
        names = runpy.run_path(source) if source.endswith(".py") else vars(_imported(source))
    except Exception as error:
        raise BadInput(
            f"{type(error).__name__}: {error}", where=source, do="name a file or module that imports"
        ) from error
    if not callable(names.get(attribute)):
        raise BadInput(f"it has no kernel {attribute!r}", where=source, do="name a function of it")
    return names[attribute]


def _imported(module: str) -> Any:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(module)


def _arguments(
    kernel: Callable[..., Any], name: str, shapes: Sequence[str], dtypes: Sequence[str], options: Sequence[str]
) -> dict[str, Any]:
    parameters = inspect.signature(getattr(kernel, "function", kernel)).parameters
    order = list(parameters)
    given: dict[str, Any] = {}
    for text in options:
        key, equals, value = text.partition("=")
        if not equals or key not in parameters:
            raise BadInput(f"{text!r} is no argument of it", where="--option", do=f"it has {', '.join(parameters)}")
        given[key] = parse_literal(value)
    default, single = torch.bfloat16, {}
    for text in dtypes:
        key, _, value = text.rpartition("=")
        known = {**cases.DTYPES, **_INTEGERS}
        if value not in known or (key and key not in parameters):
            raise BadInput(f"{text!r} names no dtype", where="--dtype", do=f"use one of {', '.join(known)}")
        if key:
            single[key] = known[value]
        else:
            default = known[value]
    for at, text in enumerate(shapes):
        key, equals, sizes = text.rpartition("=")
        key = key if equals else (order[at] if at < len(order) else "")
        if key not in parameters or key in given:
            raise BadInput(f"{text!r} is of no tensor of it", where="--shape", do=f"it has {', '.join(parameters)}")
        given[key] = _tensor(sizes, single.get(key, default))
    missing = [key for key, item in parameters.items() if item.default is item.empty and key not in given]
    if missing:
        raise BadInput(
            f"{', '.join(missing)} not given",
            where=name,
            do="give tensors by --shape and the rest by --option NAME=VALUE",
        )
    return {key: given[key] for key in order if key in given}


def _tensor(sizes: str, dtype: torch.dtype) -> torch.Tensor:
    try:
        shape = [int(size) for size in sizes.split(",") if size]
    except ValueError as error:
        raise BadInput(f"{sizes!r} is no shape", where="--shape", do="e.g. --shape 128,512") from error
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
