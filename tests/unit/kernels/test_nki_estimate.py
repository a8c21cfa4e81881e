"""The estimate: counts that can be worked out by hand, and matrix products in the order that is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pilotage.core.errors import Unsupported
from pilotage.kernels.nki import estimate, jit
from pilotage.kernels.nki import isa as nisa
from pilotage.kernels.nki import language as nl

P, FREE = 128, 512


def _load(src: Any, shape: tuple[int, int]) -> Any:
    tile = nl.ndarray(shape, src.dtype)
    nisa.dma_copy(dst=tile, src=src)
    return tile


def _store(out: Any, m: int, n: int, total: Any) -> None:
    tile = nl.ndarray((P, FREE), out.dtype)
    nisa.tensor_copy(tile, total)
    nisa.dma_copy(dst=out[m : m + P, n : n + FREE], src=tile)


def naive(a: Any, b: Any) -> Any:
    """Every tile of both operands comes in again for every product."""
    out = nl.ndarray((a.shape[1], b.shape[1]), a.dtype, nl.shared_hbm)
    for m in range(0, a.shape[1], P):
        for n in range(0, b.shape[1], FREE):
            total = nl.ndarray((P, FREE), nl.float32, nl.psum)
            for k in range(0, a.shape[0], P):
                left, right = _load(a[k : k + P, m : m + P], (P, P)), _load(b[k : k + P, n : n + FREE], (P, FREE))
                nisa.nc_matmul(total, left, right)
            _store(out, m, n, total)
    return out


def hoisted(a: Any, b: Any) -> Any:
    """The left operand's tiles stay for a row of results."""
    out = nl.ndarray((a.shape[1], b.shape[1]), a.dtype, nl.shared_hbm)
    inner = range(0, a.shape[0], P)
    for m in range(0, a.shape[1], P):
        left = [_load(a[k : k + P, m : m + P], (P, P)) for k in inner]
        for n in range(0, b.shape[1], FREE):
            total = nl.ndarray((P, FREE), nl.float32, nl.psum)
            for at, k in enumerate(inner):
                nisa.nc_matmul(total, left[at], _load(b[k : k + P, n : n + FREE], (P, FREE)))
            _store(out, m, n, total)
    return out


def blocked(a: Any, b: Any) -> Any:
    """Both operands come in once, in long rows."""
    out = nl.ndarray((a.shape[1], b.shape[1]), a.dtype, nl.shared_hbm)
    inner = range(0, a.shape[0], P)
    left = [_load(a[k : k + P, :], (P, a.shape[1])) for k in inner]
    right = [_load(b[k : k + P, :], (P, b.shape[1])) for k in inner]
    for m in range(0, a.shape[1], P):
        for n in range(0, b.shape[1], FREE):
            total = nl.ndarray((P, FREE), nl.float32, nl.psum)
            for at in range(len(inner)):
                nisa.nc_matmul(total, left[at][:, m : m + P], right[at][:, n : n + FREE])
            _store(out, m, n, total)
    return out


def _operands(k: int, m: int, n: int) -> tuple[Any, Any]:
    return np.ones((k, m), ml_dtypes.bfloat16), np.ones((k, n), ml_dtypes.bfloat16)


def test_counts_of_a_single_tile() -> None:
    told = estimate(naive, _operands(128, 128, 512))
    assert told.label == "estimate" and told.roofline == "trn2"
    assert told.dma_bytes == 2 * (128 * 128 + 128 * 512 + 128 * 512)
    assert told.dma_runs == 3 * 128
    assert told.matmul_cycles == 512 and told.matmul_macs == 128 * 128 * 512
    assert told.elements == {"vector": 512}  # out of PSUM: no faster than plain for float32
    assert told.sbuf_peak_bytes == 2 * (128 + 512) + 2 * 512 and told.psum_peak_banks == 1
    assert told.instructions == {"dma_copy": 3, "nc_matmul": 1, "tensor_copy": 1}
    assert told.seconds["tensor"] == pytest.approx(512 / 2.4e9)
    assert told.seconds["dma"] == pytest.approx((told.dma_bytes + 256 * 384) / 368e9)
    assert told.lower_s == max(told.seconds.values()) and told.upper_s == pytest.approx(sum(told.seconds.values()))


def test_float32_is_four_times_as_slow() -> None:
    wide = [one.astype(np.float32) for one in _operands(128, 128, 512)]
    assert estimate(naive, wide).matmul_cycles == 4 * 512


def test_products_come_in_the_known_order() -> None:
    told = [estimate(kernel, _operands(512, 512, 1024)) for kernel in (naive, hoisted, blocked)]
    assert told[0].matmul_macs == told[1].matmul_macs == told[2].matmul_macs
    assert told[0].dma_bytes > told[1].dma_bytes > told[2].dma_bytes
    assert told[0].lower_s > told[1].lower_s > told[2].lower_s
    assert told[0].upper_s > told[1].upper_s > told[2].upper_s
    assert max(told[0].sbuf_peak_bytes, told[1].sbuf_peak_bytes) < told[2].sbuf_peak_bytes
    assert told[0].bound_by == "dma"


def test_memory_that_is_let_go_is_not_counted_twice() -> None:
    def one_after_another(x: Any) -> None:
        for _ in range(4):
            nl.ndarray((128, 1000), nl.float32)

    def together(x: Any) -> None:
        kept = [nl.ndarray((128, 1000), nl.float32) for _ in range(4)]
        assert kept

    assert estimate(one_after_another, _operands(1, 1, 1)[:1]).sbuf_peak_bytes <= 8000
    assert estimate(together, _operands(1, 1, 1)[:1]).sbuf_peak_bytes == 16000


def test_two_cores_halve_the_time() -> None:
    @jit
    def half(x: Any) -> Any:
        rows = x.shape[0] // nl.num_programs()
        here = slice(nl.program_id() * rows, (nl.program_id() + 1) * rows)
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        tile = _load(x[here, :], (rows, x.shape[1]))
        nisa.dma_copy(dst=out[here, :], src=tile)
        return out

    x = _operands(128, 1024, 1)[:1]
    one, two = estimate(half, x), estimate(half, x, grid=2)
    assert two.cores == 2 and two.dma_bytes * 2 == one.dma_bytes
    assert two.lower_s == pytest.approx(one.lower_s / 2)


def test_says_what_it_assumes() -> None:
    told = estimate(naive, _operands(128, 128, 512))
    text = "\n".join(told.lines())
    assert "estimate for trn2" in text and text.count("assumes") == len(told.assumptions) >= 5
    assert told.to_dict()["dma_bytes"] == told.dma_bytes


def test_what_is_no_kernel() -> None:
    with pytest.raises(Unsupported, match="not a kernel"):
        estimate(object(), [])


def _kernel_docs() -> list[Callable[..., Any]]:
    from pilotage.kernels.nki import library

    return [getattr(library, name) for name in library.__all__]


def test_every_kernel_of_the_library_states_its_numerics() -> None:
    assert len(_kernel_docs()) == 8
    for kernel in _kernel_docs():
        assert "Numerics:" in (kernel.__doc__ or ""), kernel
