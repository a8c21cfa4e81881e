"""Making tensors, and moving them between HBM and SBUF."""

from __future__ import annotations

from typing import Any

import numpy as np

from pilotage.kernels.nki import session
from pilotage.kernels.nki.dtypes import DType, convert, resolve, uint8
from pilotage.kernels.nki.faults import fault
from pilotage.kernels.nki.isa import dma as _dma
from pilotage.kernels.nki.memory import MemoryRegion, Storage, allocate, region, wrap
from pilotage.kernels.nki.tensor import NkiTensor

sbuf, psum = MemoryRegion.sbuf, MemoryRegion.psum
private_hbm, shared_hbm = MemoryRegion.private_hbm, MemoryRegion.shared_hbm


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
