"""What a check does to arguments, memory and results to make mistakes show."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils.deterministic
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pilotage.kernels import cases
from pilotage.kernels.cases import Case


class Double(TorchFunctionMode):
    """Compute in fp64 what asks for fp32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        named = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **named)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill fresh memory with NaN (integers with their largest value), torch's and numpy's."""
    settings: Any = torch.utils.deterministic
    numpy: Any = np
    before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    filled, empty, empty_like = settings.fill_uninitialized_memory, np.empty, np.empty_like

    def poison(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        array = make(*args, **kwargs)
        if array.dtype.kind == "f":
            array.fill(np.nan)
        return array

    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    numpy.empty, numpy.empty_like = functools.partial(poison, empty), functools.partial(poison, empty_like)
    try:
        yield
    finally:
        numpy.empty, numpy.empty_like = empty, empty_like
        settings.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def copies(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the tensors, strides and all; what lies between the rows is NaN."""
    out = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor) and not value.is_contiguous():
            reach = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
            whole = value.new_full((reach,), float("nan"))
            out[name] = whole.as_strided(value.shape, value.stride()).copy_(value)
        else:
            out[name] = value.clone() if isinstance(value, Tensor) else value
    return out


def doubled(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the float tensors in fp64."""
    return {
        name: value.to(torch.float64) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors are equal bit by bit, NaN included."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.shape == b.shape and torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def as_rows(x: Tensor) -> Tensor:
    """View a tensor as rows of its last dimension."""
    return x.reshape(-1, x.shape[-1]) if x.ndim > 1 else x.reshape(1, -1)


def meaningful(name: str, arguments: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the index of an element that takes part in the result."""
    value = arguments[name]
    if name == "affinities":  # of an expert that is chosen
        return (0, int(value[0].argmax()))
    if "block_table" in arguments and name in ("k_cache", "v_cache"):
        return (int(arguments["block_table"][0, 0]), 0, 0, 0)
    return (0,) * value.ndim


def replaced(arguments: Mapping[str, Any], name: str, at: tuple[int, ...], value: float) -> dict[str, Any]:
    """Copy the arguments with one element of one tensor replaced."""
    out = copies(arguments)
    out[name][at] = value
    return out


def spread(
    case: Case, got: Sequence[Tensor], wanted: Sequence[Tensor], depends: Sequence[Tensor], *, hides: bool, nan: bool
) -> str:
    """Say where NaN and infinities show that should not, or do not that should, or what else they changed.

    The definition may spread them further than what depends on them (a weight of 0 times NaN); nobody has to. Which
    experts carry those of a token is open: of weights that are no numbers none is the largest.
    """
    for a, b, reached in zip(got, wanted, depends, strict=True):
        a, b, reached = a[: case.rows].float(), b[: case.rows].float(), reached[: case.rows]
        if case.operator in cases.CHOOSES:
            a, b = a.sort(-1).values, b.sort(-1).values
            reached = reached.any(-1, keepdim=True).expand_as(reached)
        finite = torch.isfinite(b)
        leaked = int((~torch.isfinite(a) & finite).sum())
        lost = 0 if hides else int((torch.isfinite(a) & ~finite & reached).sum())
        if leaked or lost:
            return f"{leaked} elements not finite that should be, {lost} finite that should not be, of {a.numel()}"
        untouched = finite & ~reached
        if nan and bool(untouched.any()):
            scale, off = float(b[untouched].abs().max()), float((a - b)[untouched].abs().max())
            if off > 16 * torch.finfo(case.dtype).eps * scale:
                return f"elements that do not depend on it are off by {off:.3g} of {scale:.3g}"
    return ""
