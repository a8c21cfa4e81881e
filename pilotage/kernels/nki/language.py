"""The functions of `nki.language` that make tensors, move them, and combine instructions."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pilotage.kernels.nki import session
from pilotage.kernels.nki.dtypes import (  # noqa: F401  the types are names of the language
    DType,
    bfloat16,
    bool_,
    convert,
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
    resolve,
    tfloat32,
    uint8,
    uint16,
    uint32,
)
from pilotage.kernels.nki.faults import fault
from pilotage.kernels.nki.hardware import (
    BN_STATS_FREE,
    MOVING_FREE,
    PARTITIONS,
    PSUM_BANK_BYTES,
    PSUM_BANKS,
    STATIONARY_FREE,
)
from pilotage.kernels.nki.isa import dma as _dma
from pilotage.kernels.nki.isa import tensor as _tensor_engine
from pilotage.kernels.nki.isa.registers import VirtualRegister
from pilotage.kernels.nki.memory import MemoryRegion, Storage, allocate, region, wrap
from pilotage.kernels.nki.operators import OPERATORS, Op, quiet
from pilotage.kernels.nki.tensor import NkiTensor
from pilotage.kernels.nki.views import ds  # noqa: F401  a name of the language

sbuf, psum = MemoryRegion.sbuf, MemoryRegion.psum
private_hbm, shared_hbm = MemoryRegion.private_hbm, MemoryRegion.shared_hbm
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


# Making tensors.


def ndarray(
    shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "", address: Any = None, par: int = 0, **hints: Any
) -> NkiTensor:
    """Make a tensor whose contents are undefined: NaN, or 4 for integers."""
    sizes = tuple(int(one) for one in (shape if isinstance(shape, tuple | list) else (shape,)))
    kind, where = resolve(dtype), region(buffer)
    if where.on_chip and len(sizes) < 2:
        fault(f"a tensor of shape {sizes} on chip", do="give it a partition and at least one free dimension")
    if where is shared_hbm and session.core().launch.cores > 1:
        return NkiTensor.whole(_shared(sizes, kind, name))
    return NkiTensor.whole(allocate(sizes, kind, where, name or "", address, par), par)


def _shared(shape: tuple[int, ...], dtype: DType, name: str) -> Storage:
    """Make, or find, the tensor that the other core makes at the same place of the kernel."""
    here = session.core()
    key: Any = name
    if not name:
        key, here.shared_made = here.shared_made, here.shared_made + 1
    found: Storage | None = here.launch.shared.get(key)
    if found is None:
        found = here.launch.shared[key] = allocate(shape, dtype, shared_hbm, name, None, 0)
    if found.shape != shape or found.dtype is not dtype:
        fault(f"the cores make different shared tensors: {found.shape} {found.dtype!r} and {shape} {dtype!r}",
              do="give shared tensors names, or make them in the same order")  # fmt: skip
    return found


def full(shape: Any, fill_value: Any, dtype: Any, buffer: Any = sbuf, name: str = "", **hints: Any) -> NkiTensor:
    """Make a tensor full of one value."""
    out = ndarray(shape, dtype, buffer, name, **hints)
    out.array()[...] = convert(np.asarray(fill_value, np.float32 if out.dtype.is_float else np.int64), out.dtype)
    if out.storage.state is not None:
        out.write(out.array())
    return out


def zeros(shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "", **hints: Any) -> NkiTensor:
    """Make a tensor of zeros."""
    return full(shape, 0, dtype, buffer, name, **hints)


def ones(shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "", **hints: Any) -> NkiTensor:
    """Make a tensor of ones."""
    return full(shape, 1, dtype, buffer, name, **hints)


def zeros_like(x: NkiTensor, dtype: Any = None, buffer: Any = None, name: str = "") -> NkiTensor:
    """Make zeros in the shape of `x`."""
    return full(x.shape, 0, dtype or x.dtype, buffer or x.buffer, name)


def empty_like(x: NkiTensor, dtype: Any = None, buffer: Any = None, name: str = "") -> NkiTensor:
    """Make an undefined tensor in the shape of `x`."""
    return ndarray(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def rand(shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "") -> NkiTensor:
    """Make a tensor of values spread evenly over [0, 1)."""
    out = ndarray(shape, dtype, buffer, name)
    out.write(session.core().random.random(out.shape, dtype=np.float32))
    return out


def random_seed(seed: Any) -> None:
    """Start the random sequence again."""
    from pilotage.kernels.nki.isa.random import set_rng_seed

    set_rng_seed(seed)


def shared_constant(constant: Any, dtype: Any = None, **hints: Any) -> NkiTensor:
    """Make a tensor in HBM of an array, or of a .npy file."""
    values = np.load(constant) if isinstance(constant, str) else np.asarray(constant)
    kind = resolve(values.dtype if dtype is None else dtype)
    return NkiTensor.whole(wrap(np.ascontiguousarray(convert(values, kind)), kind, shared_hbm))


def shared_identity_matrix(n: int, dtype: Any = uint8, dst: NkiTensor | None = None) -> NkiTensor:
    """Make an identity matrix in SBUF."""
    out = ndarray((n, n), dtype) if dst is None else dst
    out.write(np.eye(n, dtype=np.float32))
    return out


# Moving data.


def _tile_of(value: Any, dtype: Any = None) -> tuple[tuple[int, ...], DType]:
    return value.shape, resolve(value.dtype if dtype is None else dtype)


def load(src: NkiTensor, dtype: Any = None, mask: Any = None, **hints: Any) -> NkiTensor:
    """Bring a tensor from HBM into a new SBUF tile."""
    shape, kind = _tile_of(src, dtype)
    out = ndarray(shape, kind)
    masked_copy(out, src, mask)
    _dma._charge("dma_copy", out, src)
    return out


def store(dst: NkiTensor, value: Any, mask: Any = None, **hints: Any) -> None:
    """Put a tile into a tensor in HBM."""
    if not isinstance(value, NkiTensor):
        value = full(dst.shape, value, dst.dtype)
    masked_copy(dst, value, mask)
    _dma._charge("dma_copy", dst, value)


def masked_copy(dst: NkiTensor, src: NkiTensor, mask: Any) -> None:
    """Copy where the mask holds; what lies out of range may only be where it does not."""
    if mask is None:
        if dst.size != src.size:
            fault(f"{src.shape} cannot be copied into {dst.shape}")
        _dma._move(dst, src, None)
        return
    keep = np.broadcast_to(np.asarray(mask, bool), dst.shape)
    values = np.broadcast_to(read_masked(src, keep), dst.shape)
    write_masked(dst, values, keep)


def read_masked(src: NkiTensor, keep: Any) -> Any:
    """Read a view, of which only what `keep` marks must be in range."""
    if src.dynamic is None or src.dynamic.kind == "scalar":
        return src.read()
    flat, valid = src.positions(skip=True)
    if valid is not None and bool(np.any(~valid & keep)):
        fault(f"{src!r} is read out of range where the mask holds")
    return src._flat()[flat]


def write_masked(dst: NkiTensor, values: Any, keep: Any) -> None:
    """Write what `keep` marks."""
    if dst.dynamic is None or dst.dynamic.kind == "scalar":
        np.copyto(dst.array(), convert(np.asarray(values), dst.dtype), where=keep)
        return
    flat, valid = dst.positions(skip=True)
    if valid is not None and bool(np.any(~valid & keep)):
        fault(f"{dst!r} is written out of range where the mask holds")
    dst._flat()[flat[keep]] = convert(np.asarray(values), dst.dtype)[keep]


def load_transpose2d(src: NkiTensor, dtype: Any = None, mask: Any = None, **hints: Any) -> NkiTensor:
    """Bring a matrix from HBM into a new SBUF tile, transposed."""
    kind = resolve(src.dtype if dtype is None else dtype)
    rows, columns = src.shape[0], src.size // src.shape[0]
    out = ndarray((columns, rows), kind)
    out.write(src.read().reshape(rows, columns).T.copy())
    _dma._charge("dma_transpose", out, src)
    return out


# Arithmetic on tiles.


def values_of(value: Any) -> Any:
    """Read an operand in float32: a tile, or a constant."""
    if isinstance(value, NkiTensor):
        return value.read32()
    return np.float32(value)


def apply(op: Op, *operands: Any, dtype: Any = None, mask: Any = None, **hints: Any) -> NkiTensor:
    """Apply an operator to tiles and constants that broadcast against each other, into a new SBUF tile."""
    if len(operands) != op.arity:
        fault(f"{op!r} takes {op.arity} operands, and got {len(operands)}")
    tiles = [one for one in operands if isinstance(one, NkiTensor)]
    if not tiles:
        fault(f"{op!r} of no tile", do="use Python's arithmetic on numbers")
    for one in tiles:
        if not one.on_chip:
            fault(f"{op!r} of {one!r}", do="load it into SBUF first")
    keep = None if mask is None else np.asarray(mask, bool)

    def ready(one: Any) -> Any:
        if not isinstance(one, NkiTensor):
            return one if op.bitvec else np.float32(one)
        raw = one.read() if keep is None else read_masked(one, np.broadcast_to(keep, one.shape))
        return raw if op.bitvec else raw.astype(np.float32)

    with quiet():
        try:
            values = np.asarray(op.function(*[ready(one) for one in operands]))
        except ValueError:
            fault(f"{op!r} of {' and '.join(str(one.shape) for one in tiles)}, which do not broadcast")
    kind = resolve(dtype) if dtype is not None else _common(tiles)
    out = ndarray(values.shape, kind)
    if keep is None:
        out.write(values)
    else:
        write_masked(out, values, np.broadcast_to(keep, values.shape))
    engine = "scalar" if op.activation and not op.alu else "vector"
    session.core().ledger.compute(engine, op.name, out.per_partition * len(tiles))
    return out


def _common(tiles: list[NkiTensor]) -> DType:
    """Give the widest type among tiles; floats before integers."""
    return builtins.max((one.dtype for one in tiles), key=lambda kind: (kind.is_float, kind.itemsize))


def _reduce(op: Op, x: NkiTensor, axis: Any, dtype: Any, keepdims: bool, mask: Any, mean: bool = False) -> NkiTensor:
    axes = tuple(int(one) for one in (axis if isinstance(axis, tuple | list) else (axis,)))
    axes = tuple(sorted(one + x.ndim if one < 0 else one for one in axes))
    if 0 in axes or axes != tuple(range(x.ndim - len(axes), x.ndim)):
        fault(f"a reduction over {axes} of {x.shape}", do="reduce the last free dimensions, up to the very last")
    values = x.read32() if mask is None else _masked_values(x, mask, op)
    with quiet():
        out = np.asarray(op.reduction(values, axis=axes))  # type: ignore[misc]
    if mean:
        out = out / np.float32(np.prod([x.shape[one] for one in axes]))
    shape = tuple(1 if at in axes else n for at, n in enumerate(x.shape)) if keepdims else out.shape
    shape = (*shape, 1) if len(shape) < 2 else shape
    result = ndarray(shape, dtype or x.dtype)
    result.write(out.reshape(shape))
    session.core().ledger.compute("vector", "tensor_reduce", x.per_partition)
    return result


def _masked_values(x: NkiTensor, mask: Any, op: Op) -> Any:
    keep = np.broadcast_to(np.asarray(mask, bool), x.shape)
    return np.where(keep, read_masked(x, keep).astype(np.float32), np.float32(op.identity))


def sum(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False, mask: Any = None) -> NkiTensor:
    """Add up the last dimensions."""
    return _reduce(OPERATORS["add"], x, axis, dtype, keepdims, mask)


def max(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False, mask: Any = None) -> NkiTensor:
    """Find the largest over the last dimensions."""
    return _reduce(OPERATORS["maximum"], x, axis, dtype, keepdims, mask)


def min(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False, mask: Any = None) -> NkiTensor:
    """Find the smallest over the last dimensions."""
    return _reduce(OPERATORS["minimum"], x, axis, dtype, keepdims, mask)


def prod(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False, mask: Any = None) -> NkiTensor:
    """Multiply the last dimensions together."""
    return _reduce(OPERATORS["multiply"], x, axis, dtype, keepdims, mask)


def mean(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Average the last dimensions."""
    return _reduce(OPERATORS["add"], x, axis, dtype, keepdims, None, mean=True)


def all(x: NkiTensor, axis: Any, dtype: Any = None) -> NkiTensor:
    """Tell whether everything over the last dimensions is nonzero."""
    return _reduce(OPERATORS["logical_and"], x, axis, dtype, False, None)


def var(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Compute the variance over the last dimensions."""
    centre = mean(x, axis, float32, True)
    spread = apply(OPERATORS["square"], apply(OPERATORS["subtract"], x, centre, dtype=float32))
    return mean(spread, axis, dtype or x.dtype, keepdims)


def softmax(x: NkiTensor, axis: Any = -1, dtype: Any = None) -> NkiTensor:
    """Compute the softmax over the last dimensions."""
    powers = apply(OPERATORS["exp"], apply(OPERATORS["subtract"], x, max(x, axis, float32, True), dtype=float32))
    return apply(OPERATORS["divide"], powers, sum(powers, axis, float32, True), dtype=dtype or x.dtype)


def rms_norm(
    x: NkiTensor, w: NkiTensor, axis: Any, n: int, epsilon: float = 1e-6, dtype: Any = None, compute_dtype: Any = None
) -> NkiTensor:
    """Divide by the root mean square over `axis` and multiply by the weight."""
    inner = compute_dtype or float32
    squares = sum(apply(OPERATORS["square"], x, dtype=inner), axis, inner, True)
    scale = apply(OPERATORS["rsqrt"], apply(OPERATORS["add"], apply(OPERATORS["multiply"], squares, 1.0 / n), epsilon))
    normed = apply(OPERATORS["multiply"], x, scale, dtype=inner)
    return apply(OPERATORS["multiply"], normed, w, dtype=dtype or x.dtype)


def where(condition: Any, x: Any, y: Any, dtype: Any = None, mask: Any = None) -> NkiTensor:
    """Choose elements of `x` where the condition is nonzero, else of `y`."""
    tiles = [one for one in (x, y) if isinstance(one, NkiTensor)]
    values = np.where(values_of(condition) != 0, values_of(x), values_of(y))
    out = ndarray(values.shape, dtype or (_common(tiles) if tiles else float32))
    out.write(values)
    session.core().ledger.compute("vector", "where", 2 * out.per_partition)
    return out


def dropout(x: NkiTensor, rate: Any, dtype: Any = None) -> NkiTensor:
    """Replace elements by zero with probability `rate`."""
    from pilotage.kernels.nki.isa.random import dropout as instruction

    out = ndarray(x.shape, dtype or x.dtype)
    instruction(out, x, rate)
    return out


def expand_dims(x: NkiTensor, axis: int) -> NkiTensor:
    """Insert a dimension of one element."""
    return x.expand_dim(axis)


def broadcast_to(x: NkiTensor, shape: Any, dtype: Any = None, **hints: Any) -> NkiTensor:
    """Repeat a tile along its dimensions of one element."""
    wanted = tuple(int(one) for one in shape)
    if x.shape == wanted and (dtype is None or x.dtype == resolve(dtype)):
        return x
    out = ndarray(wanted, dtype or x.dtype)
    out.write(np.broadcast_to(x.read(), wanted))
    session.core().ledger.compute("vector", "broadcast_to", out.per_partition)
    return out


def transpose(x: NkiTensor, dtype: Any = None, mask: Any = None) -> NkiTensor:
    """Swap partitions and free elements, into PSUM."""
    out = ndarray((x.per_partition, x.shape[0]), dtype or x.dtype, psum)
    flat = x.read().reshape(x.shape[0], -1)
    if x.shape[0] > PARTITIONS or x.per_partition > PARTITIONS:
        fault(f"a transpose of {x.shape}", do="tile it to at most 128 by 128")
    out.write(flat.T, _tensor_engine.BY_MATMUL)
    session.core().ledger.matmul("nc_transpose", float(np.maximum(x.shape[0], _tensor_engine.MIN_CYCLES)), 0)
    return out


def matmul(x: NkiTensor, y: NkiTensor, transpose_x: bool = False, mask: Any = None) -> NkiTensor:
    """Compute x @ y (x.T @ y with `transpose_x`) into PSUM; without it, x is transposed first."""
    if session.core().launch.legacy:  # the tracer of NKI 0.1 moves operands to SBUF by itself
        x, y = (_in_sbuf(one) for one in (x, y))
    stationary = x
    if not transpose_x:
        stationary = ndarray((x.per_partition, x.shape[0]), x.dtype)
        flipped = transpose(x)
        stationary.write(flipped.read())
        session.core().ledger.compute("vector", "tensor_copy", stationary.per_partition)
    out = ndarray((stationary.per_partition, y.per_partition), float32, psum)
    _tensor_engine.nc_matmul(out, stationary, y)
    return out


def _in_sbuf(x: NkiTensor) -> NkiTensor:
    if x.buffer is sbuf:
        return x
    out = ndarray(x.shape, x.dtype)
    out.write(x.read())
    session.core().ledger.compute("vector", "tensor_copy", out.per_partition)
    return out


def gather_flattened(
    data: NkiTensor, indices: NkiTensor, axis: int = 0, dtype: Any = None, mask: Any = None
) -> NkiTensor:
    """Gather within each partition by flattened position."""
    flat = data.read().reshape(data.shape[0], -1)
    at = indices.read().reshape(indices.shape[0], -1).astype(np.int64)
    if at.size and (at.min() < 0 or at.max() >= flat.shape[1]):
        fault(f"gather_flattened: an index is out of range for {flat.shape[1]} elements a partition")
    out = ndarray(indices.shape, dtype or data.dtype)
    out.write(np.take_along_axis(flat, at, 1).reshape(out.shape))
    session.core().ledger.compute("gpsimd", "nc_n_gather", out.per_partition)
    return out


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
