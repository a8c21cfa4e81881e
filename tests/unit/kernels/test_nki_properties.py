"""The interpreter against numpy over random shapes and values."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from nki_tiles import hbm, tile

from pilotage.kernels.nki import isa as nisa
from pilotage.kernels.nki import language as nl
from pilotage.kernels.nki import layout
from pilotage.kernels.nki.dtypes import convert, round_to_tf32

FEW = settings(max_examples=40, deadline=None)
SIZES = st.integers(1, 6)
SEEDS = st.integers(0, 2**32 - 1)


def values(shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@FEW
@given(st.lists(SIZES, min_size=2, max_size=4), SEEDS)
def test_indexing_is_numpys(shape: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    array = values(tuple(shape), seed)
    keys: list[Any] = []
    for size in shape:
        start = int(rng.integers(0, size))
        stop = int(rng.integers(start + 1, size + 1))
        keys.append(slice(start, stop, int(rng.integers(1, 3))))
    tensor = hbm(array)
    assert np.array_equal(tensor[tuple(keys)].read(), array[tuple(keys)])
    dropped = tuple(int(rng.integers(0, size)) for size in shape[:-1])
    assert np.array_equal(tensor[dropped].read(), array[dropped])
    assert tensor[(*dropped, 0)].shape == (1,)


@FEW
@given(st.lists(SIZES, min_size=2, max_size=4), SEEDS)
def test_views_compose(shape: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    array = values(tuple(shape), seed)
    order = tuple(rng.permutation(len(shape)).tolist())
    view = hbm(array).permute(order)
    assert np.array_equal(view.read(), array.transpose(order))
    assert np.array_equal(view.expand_dim(1).broadcast(1, 3).read(), np.repeat(array.transpose(order)[:, None], 3, 1))
    flat = hbm(array).reshape((-1, shape[-1]))
    assert np.array_equal(flat.read(), array.reshape(-1, shape[-1]))
    pattern = view.get_pattern()
    assert np.array_equal(hbm(array).ap(pattern).read(), view.read())


@FEW
@given(st.lists(SIZES, min_size=1, max_size=4), st.lists(SIZES, min_size=1, max_size=4), SEEDS)
def test_strides_of_a_reshape_show_the_same_elements_or_there_are_none(
    old: list[int], new: list[int], seed: int
) -> None:
    order = np.random.default_rng(seed).permutation(len(old))
    array = np.arange(int(np.prod(old))).reshape(old).transpose(order)
    strides = tuple(one // 8 for one in array.strides)
    found = layout.restride(array.shape, strides, tuple(new))
    if np.prod(old) != np.prod(new):
        assert found is None
        return
    wanted = array.reshape(new)
    if found is None:
        assert not np.shares_memory(wanted, array)
    else:
        base = np.arange(array.size)
        assert np.array_equal(np.lib.stride_tricks.as_strided(base, new, [one * 8 for one in found]), wanted)


@FEW
@given(st.integers(1, 128), st.integers(1, 128), st.integers(1, 512), SEEDS)
def test_matmul(k: int, m: int, n: int, seed: int) -> None:
    a, b = values((k, m), seed), values((k, n), seed + 1)
    dst = nl.ndarray((m, n), nl.float32, nl.psum)
    for _ in range(2):
        nisa.nc_matmul(dst, tile(a, nl.bfloat16), tile(b, nl.bfloat16))
    a, b = (one.astype(ml_dtypes.bfloat16).astype(np.float64) for one in (a, b))
    np.testing.assert_allclose(dst.read(), 2 * (a.T @ b), rtol=1e-4, atol=1e-4)


@FEW
@given(st.integers(1, 9), st.integers(1, 40), SEEDS)
def test_softmax_of_instructions(rows: int, columns: int, seed: int) -> None:
    x = values((rows, columns), seed) * 5
    data, top, total = tile(x), nl.ndarray((rows, 1), nl.float32), nl.ndarray((rows, 1), nl.float32)
    nisa.tensor_reduce(top, nl.maximum, data, axis=1, negate=True)
    nisa.activation(
        data, nl.exp, data, bias=top, reduce_op=nl.add, reduce_res=total, reduce_cmd=nisa.reduce_cmd.reset_reduce
    )
    nisa.reciprocal(total, total)
    nisa.tensor_scalar(data, data, nl.multiply, total)
    wide = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(data.read(), wide / wide.sum(1, keepdims=True), rtol=2e-6, atol=1e-7)


@FEW
@given(st.integers(1, 20), st.integers(1, 12), SEEDS)
def test_scatter_then_gather_is_the_identity(rows: int, columns: int, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(rows).reshape(-1, 1)
    data, cache, back = (
        tile(values((rows, columns), seed)),
        hbm(np.zeros((rows, columns))),
        nl.ndarray((rows, columns), nl.float32),
    )
    place = cache.ap([[columns, rows], [1, columns]], vector_offset=tile(order, nl.int32), indirect_dim=0)
    nisa.dma_copy(dst=place, src=data)
    nisa.dma_copy(dst=back, src=place)
    assert np.array_equal(back.read(), data.read())
    assert np.array_equal(cache.read()[order[:, 0]], data.read())


@FEW
@given(st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=20))
def test_conversions(given_values: list[float]) -> None:
    wide = np.array(given_values, np.float32)
    for dtype in (nl.bfloat16, nl.float16, nl.float8_e5m2):
        with np.errstate(over="ignore"):
            expected = wide.astype(dtype.exact)
        assert np.array_equal(convert(wide, dtype).astype(np.float32), expected.astype(np.float32))
    whole = convert(wide, nl.int32).astype(np.float64)
    assert np.array_equal(whole, np.clip(np.rint(wide.astype(np.float64)), -(2**31), 2**31 - 1))
    # Half a step of ten bits; numbers below the smallest normal one share its step.
    assert np.all(np.abs(round_to_tf32(wide) - wide) <= np.maximum(np.abs(wide), 2.0**-126) * 2.0**-11)


@FEW
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), SEEDS)
def test_dma_transpose(a: int, b: int, c: int, d: int, seed: int) -> None:
    array = values((a, b, c, d), seed)
    dst = nl.ndarray((d, b, c, a), nl.float32)
    nisa.dma_transpose(dst, hbm(array))
    assert np.array_equal(dst.read(), array.transpose(3, 1, 2, 0))
