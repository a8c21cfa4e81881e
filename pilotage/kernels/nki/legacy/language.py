"""`neuronxcc.nki.language`: the language of NKI 0.1, with block dimensions and index arrays."""

from __future__ import annotations

import builtins
from typing import Any, NamedTuple

import numpy as np

from pilotage.kernels.nki import language
from pilotage.kernels.nki.dtypes import convert, resolve
from pilotage.kernels.nki.language import *  # noqa: F403
from pilotage.kernels.nki.operators import OPERATORS
from pilotage.kernels.nki.tensor import NkiTensor

globals().update(OPERATORS)
fp32 = language.float32


class par_dim(int):
    """Marks the partition dimension of a shape."""


def _shape(shape: Any) -> tuple[tuple[int, ...], int]:
    sizes = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
    marked = [at for at, one in enumerate(sizes) if isinstance(one, par_dim)]
    return tuple(int(one) for one in sizes), marked[0] if marked else 0


def ndarray(shape: Any, dtype: Any, *, buffer: Any = None, name: str = "", **hints: Any) -> NkiTensor:
    """Make a tensor; dimensions in front of `par_dim` are blocks."""
    sizes, par = _shape(shape)
    where = language.region(buffer)
    if where.on_chip and len(sizes) == par + 1:
        sizes = (*sizes, 1)
    return language.ndarray(sizes, dtype, where, name, None, par if where.on_chip else 0)


def full(shape: Any, fill_value: Any, dtype: Any, *, buffer: Any = None, name: str = "", **hints: Any) -> NkiTensor:
    """Make a tensor full of one value."""
    out = ndarray(shape, dtype, buffer=buffer, name=name)
    out.write(np.broadcast_to(np.float32(fill_value), out.shape))
    return out


def zeros(shape: Any, dtype: Any, *, buffer: Any = None, name: str = "", **hints: Any) -> NkiTensor:
    """Make a tensor of zeros."""
    return full(shape, 0, dtype, buffer=buffer, name=name)


def ones(shape: Any, dtype: Any, *, buffer: Any = None, name: str = "", **hints: Any) -> NkiTensor:
    """Make a tensor of ones."""
    return full(shape, 1, dtype, buffer=buffer, name=name)


def arange(*bounds: int) -> Any:
    """Give an index array."""
    return np.arange(*bounds)


class _Grid(NamedTuple):
    axes: tuple[Any, ...]

    def __iter__(self) -> Any:  # type: ignore[override]
        return iter(self.axes)

    @property
    def p(self) -> Any:
        return self.axes[0]

    @property
    def x(self) -> Any:
        return self.axes[-1]

    @property
    def y(self) -> Any:
        return self.axes[-2]

    @property
    def z(self) -> Any:
        return self.axes[-3]


class _MGrid:
    def __getitem__(self, key: Any) -> _Grid:
        slices = key if isinstance(key, tuple) else (key,)
        return _Grid(tuple(np.ogrid[slices]) if len(slices) > 1 else (np.ogrid[slices[0]],))


mgrid = _MGrid()


def static_cast(value: Any, dtype: Any) -> Any:
    """Convert an array."""
    return np.asarray(convert(np.asarray(value), resolve(dtype)))


class nc:
    """A number of cores in a launch grid."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __mul__(self, other: int) -> nc:
        return nc(self.size * int(other))

    __rmul__ = __mul__


def spmd_dim(*sizes: Any) -> nc:
    """Give the product of a grid dimension's parts."""
    return nc(int(np.prod([int(getattr(one, "size", one)) for one in sizes])))


def loop_reduce(*args: Any, **kwargs: Any) -> Any:
    """Refused: its meaning depends on the tracer of NKI 0.1."""
    from pilotage.kernels.nki.faults import fault

    fault("nl.loop_reduce is not supported", do="accumulate into a tile")


range = builtins.range
