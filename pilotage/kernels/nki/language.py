"""`nki.language`: its types, regions, sizes, loops and grid, and the functions of `making` and `functions`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pilotage.kernels.nki import session
from pilotage.kernels.nki.dtypes import (  # noqa: F401  the types are names of the language
    bfloat16,
    bool_,
    float4_e2m1fn_x4,
    float8_e4m3,
    float8_e4m3fn,
    float8_e4m3fn_x4,
    float8_e5m2,
    float8_e5m2_x4,
    float8_e8m0fnu,
    float16,
    float32,
    int8,
    int16,
    int32,
    tfloat32,
    uint8,
    uint16,
    uint32,
)
from pilotage.kernels.nki.faults import fault
from pilotage.kernels.nki.functions import (  # noqa: F401
    all,
    apply,
    broadcast_to,
    dropout,
    expand_dims,
    gather_flattened,
    matmul,
    max,
    mean,
    min,
    prod,
    rms_norm,
    softmax,
    sum,
    transpose,
    values_of,
    var,
    where,
)
from pilotage.kernels.nki.hardware import (
    BN_STATS_FREE,
    MOVING_FREE,
    PARTITIONS,
    PSUM_BANK_BYTES,
    PSUM_BANKS,
    STATIONARY_FREE,
)
from pilotage.kernels.nki.isa.registers import VirtualRegister
from pilotage.kernels.nki.making import (  # noqa: F401
    empty_like,
    full,
    load,
    load_transpose2d,
    masked_copy,
    ndarray,
    ones,
    private_hbm,
    psum,
    rand,
    random_seed,
    read_masked,
    sbuf,
    shared_constant,
    shared_hbm,
    shared_identity_matrix,
    store,
    write_masked,
    zeros,
    zeros_like,
)
from pilotage.kernels.nki.memory import region
from pilotage.kernels.nki.operators import OPERATORS
from pilotage.kernels.nki.tensor import NkiTensor
from pilotage.kernels.nki.views import ds  # noqa: F401  a name of the language

hbm = private_hbm
tensor = NkiTensor


class NKIObject:
    """Base of the plain classes that kernels declare: their fields become arguments, as in a dataclass.

    The language counts `x = None` as a field too, and gives a field without a default None; `dataclasses` does neither.
    Both are put right here, before the decorator looks.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = dict(cls.__dict__.get("__annotations__", {}))  # noqa: RUF063 - Python 3.11 has no other way
        for name, value in list(vars(cls).items()):
            plain = value is None or isinstance(value, bool | int | float | str | tuple)
            if plain and name not in known and not name.startswith("_"):
                known[name] = Any
        cls.__annotations__ = known
        for name in known:
            if name not in vars(cls):
                setattr(cls, name, None)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        fields: list[str] = []
        for one in reversed(type(self).__mro__):
            declared = one.__dict__.get("__annotations__", {})  # noqa: RUF063
            fields += [name for name in declared if name not in fields]
        for name, value in zip(fields, args, strict=False):
            setattr(self, name, value)
        for name, value in kwargs.items():
            setattr(self, name, value)
        for name in fields:
            if not hasattr(self, name):
                setattr(self, name, None)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Run after the fields are set."""


class _TileSize(NKIObject):
    """Sizes of the hardware."""

    pmax = PARTITIONS
    psum_fmax = psum_bank_fmax = PSUM_BANK_BYTES // 4
    psum_bank_fmax_bytes = PSUM_BANK_BYTES
    psum_num_banks = PSUM_BANKS
    gemm_stationary_fmax = STATIONARY_FREE
    gemm_moving_fmax = MOVING_FREE
    bn_stats_fmax = BN_STATS_FREE
    psum_min_align = 4
    sbuf_min_align = 1

    @property
    def sbuf_fmax_bytes(self) -> int:
        return session.core().launch.generation.sbuf_bytes

    @property
    def sbuf_fmax(self) -> int:
        return self.sbuf_fmax_bytes // 4

    @property
    def sbuf_size_bytes(self) -> int:
        return self.sbuf_fmax_bytes * PARTITIONS

    @property
    def total_available_sbuf_size(self) -> int:
        return self.sbuf_fmax_bytes


tile_size = _TileSize()


def is_hbm(buffer: Any) -> bool:
    """Tell whether a region is HBM."""
    return not region(buffer).on_chip


def is_on_chip(buffer: Any) -> bool:
    """Tell whether a region is SBUF or PSUM."""
    return region(buffer).on_chip


def is_psum(buffer: Any) -> bool:
    """Tell whether a region is PSUM."""
    return region(buffer) is psum


def is_sbuf(buffer: Any) -> bool:
    """Tell whether a region is SBUF."""
    return region(buffer) is sbuf


# Loops and the grid.


def affine_range(start: Any, stop: Any = None, step: Any = 1, **hints: Any) -> range:
    """Count, like `range`."""
    return range(int(start)) if stop is None else range(int(start), int(stop), int(step))


sequential_range = static_range = affine_range


def dynamic_range(start: Any, stop: Any = None, step: int = 1) -> Iterator[VirtualRegister]:
    """Count in a register; bounds may be registers."""
    for value in affine_range(start, stop, step):
        yield VirtualRegister(value, frozen=True)


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[VirtualRegister], None], step: int = 1) -> None:
    """Run `body_fun(i)` for every i from `lower` to `upper`."""
    if not isinstance(step, int) or step < 1:
        fault(f"fori_loop with step {step!r}", do="give a positive constant")
    for value in range(int(lower), int(upper), step):
        if body_fun(VirtualRegister(value, frozen=True)) is not None:
            fault("the body of fori_loop returns a value", do="carry state in SBUF or HBM")


def while_loop(init: VirtualRegister, body_fun: Callable[[VirtualRegister], VirtualRegister]) -> None:
    """Run `r = body_fun(r)` while r is not zero."""
    held = init
    while int(held) != 0:
        held = body_fun(VirtualRegister(int(held)))


@contextlib.contextmanager
def no_reorder() -> Iterator[None]:
    """Keep the order of what is inside; everything is in order here."""
    yield


def program_id(axis: int = 0) -> int:
    """Give this core's place in the grid."""
    place = session.core().place
    return place[axis] if axis < len(place) else 0


def num_programs(axes: Any = 0) -> int:
    """Give the size of the grid along an axis, or of all of it for None."""
    grid = session.core().launch.grid
    if axes is None:
        return int(np.prod(grid)) if grid else 1
    if isinstance(axes, tuple | list):
        return int(np.prod([num_programs(one) for one in axes]))
    return grid[axes] if axes < len(grid) else 1


def program_ndim() -> int:
    """Give the number of axes of the grid."""
    return len(session.core().launch.grid)


def device_print(print_prefix: str, tensor: Any = None, **hints: Any) -> None:
    """Print a tensor."""
    print(print_prefix, tensor.read() if isinstance(tensor, NkiTensor) else tensor)


# Operators are functions too.
average = type("average", (), {"__name__": "average"})
prelu = type("prelu", (), {"__name__": "prelu"})
globals().update(OPERATORS)
