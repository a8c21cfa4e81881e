"""How a wrapped kernel is run: what becomes of torch tensors on the way in, and of what it returns on the way out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pilotage.core.errors import BadInput, Unavailable

Launch = Callable[[Callable[..., Any], tuple[int, ...], Sequence[Any], Mapping[str, Any]], Any]


def launch_torch(
    kernel: Callable[..., Any], grid: tuple[int, ...], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call a kernel that takes and returns torch tensors.

    A grid goes to `kernel[grid]` where the kernel can be indexed, else to its argument `grid`.

    Raises:
        BadInput: there is a grid and the kernel can do nothing with it.
    """
    if not grid:
        return kernel(*args, **kwargs)
    if hasattr(kernel, "__getitem__"):
        return kernel[grid](*args, **kwargs)
    if "grid" in inspect.signature(kernel).parameters:
        return kernel(*args, **kwargs, grid=grid)
    raise BadInput(
        f"a grid of {grid}, and the kernel takes none",
        where=getattr(kernel, "__name__", str(kernel)),
        do="call it without [grid], or give it an argument named grid",
    )


def launch_numpy(
    kernel: Callable[..., Any], grid: tuple[int, ...], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call a kernel on numpy arrays that share memory with the tensors, so that it can write them in place."""
    returned = launch_torch(
        kernel, grid, [to_numpy(value) for value in args], {name: to_numpy(value) for name, value in kwargs.items()}
    )
    return _to_tensors(returned)


def launch_nki(
    kernel: Callable[..., Any], grid: tuple[int, ...], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call an NKI kernel: as it is on a NeuronCore, through arrays in the interpreter on the CPU."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if any(value.device.type != "cpu" for value in tensors):
        return launch_torch(kernel, grid, args, kwargs)
    return launch_numpy(kernel, grid, args, kwargs)


def to_numpy(value: Any) -> Any:
    """View a tensor as an array of the same memory; anything else passes.

    Raises:
        Unavailable: a dtype that numpy lacks, without the package ml_dtypes.
    """
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    try:
        return value.numpy()
    except TypeError:
        bits = {1: torch.uint8, 2: torch.int16}[value.element_size()]
        return value.view(bits).numpy().view(_ml_dtype(value.dtype))


def to_torch(value: Any) -> Any:
    """View an array, or what converts to one, as a tensor; tensors and None pass."""
    if value is None or isinstance(value, Tensor):
        return value
    array = np.asarray(value)
    by_name: Any = getattr(torch, array.dtype.name, None)
    if isinstance(by_name, torch.dtype) and array.dtype.kind == "V":  # bfloat16 and the 8-bit floats of ml_dtypes
        bits = {1: np.uint8, 2: np.int16}[array.dtype.itemsize]
        return torch.from_numpy(np.ascontiguousarray(array).view(bits)).view(by_name)
    return torch.from_numpy(array)


def _to_tensors(returned: Any) -> Any:
    if isinstance(returned, (tuple, list)):
        return tuple(to_torch(value) for value in returned)
    return to_torch(returned)


def _ml_dtype(dtype: torch.dtype) -> Any:
    name = str(dtype).removeprefix("torch.")
    try:
        import ml_dtypes
    except ImportError as error:
        raise Unavailable(f"numpy has no {name}", where="launch", do="pip install ml_dtypes") from error
    return getattr(ml_dtypes, name)
