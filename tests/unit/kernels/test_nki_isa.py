"""Every instruction of the NKI interpreter against values worked out by hand."""

from __future__ import annotations

import inspect
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from nki_tiles import got, hbm, tile

from pilotage.kernels.nki import isa as nisa
from pilotage.kernels.nki import language as nl

NAN = float("nan")


@pytest.fixture
def gen4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand for a Trainium 3 core."""
    from pilotage.kernels.nki import session

    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")
    monkeypatch.setattr(session._here, "core", session.Core(session.Launch(), 0), raising=False)


# Tensor engine


def test_nc_matmul_contracts_the_partitions() -> None:
    dst = nl.ndarray((3, 2), nl.float32, nl.psum)
    nisa.nc_matmul(dst, tile([[1, 2, 3], [4, 5, 6]]), tile([[10, 20], [30, 40]]))
    assert got(dst) == [[130, 180], [170, 240], [210, 300]]


def test_nc_matmul_first_overwrites_then_accumulates() -> None:
    dst = nl.ndarray((1, 2), nl.float32, nl.psum)
    assert math.isnan(got(dst)[0][0])
    for expected in ([[2, 3]], [[4, 6]], [[6, 9]]):
        nisa.nc_matmul(dst, tile([[1.0]]), tile([[2.0, 3.0]]))
        assert got(dst) == expected
    nisa.nc_matmul(dst, tile([[1.0]]), tile([[2.0, 3.0]]), accumulate=False)
    assert got(dst) == [[2, 3]]
    nisa.nc_matmul(dst, tile([[1.0]]), tile([[2.0, 3.0]]), accumulate=True)
    assert got(dst) == [[4, 6]]


def test_nc_matmul_accumulates_location_by_location() -> None:
    dst = nl.ndarray((1, 4), nl.float32, nl.psum)
    nisa.nc_matmul(dst[:, 0:2], tile([[1.0]]), tile([[1.0, 2.0]]))
    nisa.nc_matmul(dst, tile([[1.0]]), tile([[10.0, 20.0, 30.0, 40.0]]))
    assert got(dst) == [[11, 22, 30, 40]]


def test_nc_matmul_is_transpose_moves_bits() -> None:
    dst = nl.ndarray((2, 2), nl.float32, nl.psum)
    nisa.nc_matmul(dst, tile([[1, math.inf], [-0.0, NAN]]), tile([[1, 0], [0, 1]]), is_transpose=True)
    values = dst.read()
    assert values[0, 0] == 1 and values[1, 0] == math.inf and math.isnan(values[1, 1])
    assert np.signbit(values[0, 1])


def test_nc_matmul_double_row_pairs_partition_and_first_free_dimension() -> None:
    stationary = tile([[[1], [2]], [[3], [4]]], nl.float8_e4m3)  # [K=2, 2, M=1]
    moving = tile([[[1, 0], [0, 1]], [[2, 0], [0, 2]]], nl.float8_e5m2)  # [K=2, 2, N=2]
    dst = nl.ndarray((1, 2), nl.float32, nl.psum)
    nisa.nc_matmul(dst, stationary, moving, perf_mode=nisa.matmul_perf_mode.double_row)
    assert got(dst) == [[1 + 3 * 2, 2 + 4 * 2]]


def test_nc_matmul_rounds_tfloat32_operands() -> None:
    fine = 1 + 2**-12  # beyond 10 bits of mantissa
    dst = nl.ndarray((1, 1), nl.float32, nl.psum)
    nisa.nc_matmul(dst, tile([[fine]], nl.tfloat32), tile([[1.0]], nl.tfloat32))
    assert got(dst) == [[1.0]]


@pytest.mark.parametrize("engine", [nisa.engine.tensor, nisa.engine.vector, nisa.engine.unknown])
def test_nc_transpose_swaps_partition_and_free(engine: nisa.engine) -> None:
    where = nl.sbuf if engine is nisa.engine.vector else nl.psum
    dst = nl.ndarray((3, 2), nl.float32, where)
    nisa.nc_transpose(dst, tile([[1, 2, 3], [4, 5, 6]]), engine=engine)
    assert got(dst) == [[1, 4], [2, 5], [3, 6]]


def test_nc_transpose_flattens_free_dimensions() -> None:
    dst = nl.ndarray((4, 2), nl.bfloat16, nl.psum)
    nisa.nc_transpose(dst, tile([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], nl.bfloat16))
    assert got(dst) == [[1, 5], [2, 6], [3, 7], [4, 8]]


# DMA


def test_dma_copy_goes_in_row_major_order_of_both_views() -> None:
    dst = nl.ndarray((2, 3), nl.float32)
    nisa.dma_copy(dst=dst, src=hbm([[1, 2], [3, 4], [5, 6]]))
    assert got(dst) == [[1, 2, 3], [4, 5, 6]]


def test_dma_copy_converts_through_float32() -> None:
    dst = nl.ndarray((1, 3), nl.int32)
    nisa.dma_copy(dst=dst, src=hbm([[0.5, 1.5, -2.6]]))
    assert got(dst) == [[0, 2, -3]]


def test_dma_copy_gathers_rows_in_the_order_of_the_indices() -> None:
    dst = nl.ndarray((3, 2), nl.float32)
    data = hbm([[0, 1], [10, 11], [20, 21], [30, 31]])
    rows = data.ap([[2, 3], [1, 2]], vector_offset=tile([[3], [0], [3]], nl.uint32), indirect_dim=0)
    nisa.dma_copy(dst=dst, src=rows)
    assert got(dst) == [[30, 31], [0, 1], [30, 31]]


def test_dma_copy_scatters_and_skips_what_is_out_of_range() -> None:
    cache = hbm([[0, 0], [0, 0], [0, 0]])
    rows = cache.ap([[2, 3], [1, 2]], vector_offset=tile([[2], [-1], [0]], nl.int32), indirect_dim=0)
    nisa.dma_copy(dst=rows, src=tile([[1, 2], [3, 4], [5, 6]]), oob_mode=nisa.oob_mode.skip)
    assert got(cache) == [[5, 6], [0, 0], [1, 2]]


def test_dma_copy_gather_that_skips_leaves_the_destination() -> None:
    dst = tile([[7, 7], [8, 8]])
    rows = hbm([[1, 2], [3, 4]]).ap([[2, 2], [1, 2]], vector_offset=tile([[9], [1]], nl.int32))
    nisa.dma_copy(dst=dst, src=rows, oob_mode=nisa.oob_mode.skip)
    assert got(dst) == [[7, 7], [3, 4]]


def test_dma_copy_from_a_scalar_offset() -> None:
    data = hbm(np.arange(12).reshape(6, 2))
    dst = nl.ndarray((2, 2), nl.float32)
    nisa.dma_copy(dst=dst, src=data.ap([[2, 2], [1, 2]], scalar_offset=tile([[3]], nl.int32), indirect_dim=0))
    assert got(dst) == [[6, 7], [8, 9]]
    nisa.dma_copy(dst=dst, src=data.ap([[2, 2], [1, 2]], scalar_offset=nisa.register_alloc(1), indirect_dim=0))
    assert got(dst) == [[2, 3], [4, 5]]


def test_dma_copy_of_nki_0_2_combines() -> None:
    dst = tile([[1, 2]])
    nisa.dma_copy(dst=dst, src=hbm([[10, 20]]), dst_rmw_op=nl.add)
    assert got(dst) == [[11, 22]]


def test_dma_transpose_two_dimensions() -> None:
    dst = nl.ndarray((3, 2), nl.float32)
    nisa.dma_transpose(dst, hbm([[1, 2, 3], [4, 5, 6]]))
    assert got(dst) == [[1, 4], [2, 5], [3, 6]]


def test_dma_transpose_three_dimensions_reverses() -> None:
    dst = nl.ndarray((2, 2, 2), nl.float32)
    nisa.dma_transpose(dst, hbm([[[1, 2], [3, 4]], [[5, 6], [7, 8]]]))
    assert got(dst) == [[[1, 5], [3, 7]], [[2, 6], [4, 8]]]


def test_dma_transpose_four_dimensions_swaps_the_outer_two_only() -> None:
    """The default is (3, 1, 2, 0): element [a, b, c, d] goes to [d, b, c, a]; the middle keeps its order."""
    src = np.arange(24).reshape(2, 2, 3, 2)
    dst = nl.ndarray((2, 2, 3, 2), nl.float32)
    nisa.dma_transpose(dst, hbm(src))
    assert got(dst)[0][0] == [[0, 12], [2, 14], [4, 16]]
    assert got(dst)[1][1] == [[7, 19], [9, 21], [11, 23]]


def test_dma_transpose_gathers_columns_of_the_indices_first() -> None:
    """flat = indices.T.flatten(): with two columns of indices the first column comes first."""
    data = hbm(np.arange(8).reshape(4, 2))
    indices = tile([[3, 1], [0, 2]], nl.uint32)
    dst = nl.ndarray((2, 4), nl.float32)
    nisa.dma_transpose(dst, data.ap([[2, 4], [1, 2]], vector_offset=indices, indirect_dim=0), axes=(1, 0))
    assert got(dst) == [[6, 0, 2, 4], [7, 1, 3, 5]]


def test_dma_compute_adds() -> None:
    dst = nl.ndarray((1, 2), nl.bfloat16)
    nisa.dma_compute(dst, [hbm([[1, 2]]), tile([[10, 20]]), hbm([[100, 200]])], reduce_op=nl.add)
    assert got(dst) == [[111, 222]]


def test_dma_compute_scatters_by_adding() -> None:
    cache = hbm([[1, 1], [2, 2], [3, 3]])
    rows = cache.ap([[2, 2], [1, 2]], vector_offset=tile([[2], [0]], nl.int32))
    nisa.dma_compute(rows, [tile([[10, 20], [30, 40]]), rows], reduce_op=nl.add)
    assert got(cache) == [[31, 41], [2, 2], [13, 23]]


def test_dma_compute_gathers_by_adding() -> None:
    mine = tile([[1, 1], [2, 2]])
    rows = hbm([[10, 20], [30, 40]]).ap([[2, 2], [1, 2]], vector_offset=tile([[1], [1]], nl.int32))
    nisa.dma_compute(mine, [rows, mine], reduce_op=nl.add)
    assert got(mine) == [[31, 41], [32, 42]]


# Vector engine


def test_tensor_copy_keeps_bits_of_equal_types() -> None:
    dst = nl.ndarray((1, 2), nl.int32)
    nisa.tensor_copy(dst, tile([[2**30 + 1, -5]], nl.int32))
    assert got(dst) == [[2**30 + 1, -5]]


def test_tensor_copy_rounds_to_nearest_even() -> None:
    dst = nl.ndarray((1, 3), nl.bfloat16)
    nisa.tensor_copy(dst, tile([[1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-9]]))
    assert got(dst) == [[1, 1 + 2**-6, 1]]


def test_memset() -> None:
    for dtype, value in ((nl.float32, 1.5), (nl.int32, -3), (nl.uint8, 255)):
        dst = nl.ndarray((2, 1), dtype)
        nisa.memset(dst, value)
        assert got(dst) == [[value], [value]]


def test_new_tensors_are_nan_and_four() -> None:
    assert np.isnan(nl.ndarray((2, 3), nl.bfloat16).read32()).all()
    assert got(nl.ndarray((1, 2), nl.uint16)) == [[4, 4]]


_BINARY = {
    "add": [5, -1], "subtract": [1, -5], "multiply": [6, -6], "maximum": [3, 2], "minimum": [2, -3],
    "abs_max": [3, 3], "abs_min": [2, 2], "power": [9, 9], "equal": [0, 0], "not_equal": [1, 1], "greater": [1, 0],
    "greater_equal": [1, 0], "less": [0, 1], "less_equal": [0, 1], "logical_and": [1, 1], "logical_or": [1, 1],
    "logical_xor": [0, 0],
}  # fmt: skip


@pytest.mark.parametrize("name", _BINARY)
def test_tensor_tensor(name: str) -> None:
    dst = nl.ndarray((1, 2), nl.float32)
    nisa.tensor_tensor(dst, tile([[3, -3]]), tile([[2, 2]]), getattr(nl, name))
    assert got(dst) == [_BINARY[name]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("bitwise_and", 0b1000), ("bitwise_or", 0b1110), ("bitwise_xor", 0b0110), ("left_shift", 0b1100 << 10)],
)
def test_tensor_tensor_on_bits(name: str, expected: int) -> None:
    dst = nl.ndarray((1, 1), nl.int32)
    nisa.tensor_tensor(dst, tile([[0b1100]], nl.int32), tile([[0b1010]], nl.int32), getattr(nl, name))
    assert got(dst) == [[expected]]


def test_tensor_tensor_of_32_bit_integers_is_exact() -> None:
    dst = nl.ndarray((1, 1), nl.int32)
    nisa.tensor_tensor(dst, tile([[2**24 + 1]], nl.int32), tile([[2]], nl.int32), nl.add)
    assert got(dst) == [[2**24 + 3]]
    nisa.tensor_tensor(dst, tile([[2**24 + 1]], nl.int32), tile([[2]], nl.int32), nl.add, engine=nisa.engine.vector)
    assert got(dst) == [[2**24 + 2]]  # float32 on the vector engine


def test_tensor_scalar_two_steps_and_reversals() -> None:
    dst = nl.ndarray((2, 2), nl.float32)
    data, column = tile([[1, 2], [3, 4]]), tile([[10], [100]])
    nisa.tensor_scalar(dst, data, nl.multiply, column, op1=nl.add, operand1=1.0)
    assert got(dst) == [[11, 21], [301, 401]]
    nisa.tensor_scalar(dst, data, nl.subtract, 10.0, reverse0=True, op1=nl.subtract, operand1=column, reverse1=True)
    assert got(dst) == [[1, 2], [93, 94]]
    nisa.tensor_scalar(dst, data, nl.rsqrt, 0.0)
    assert got(dst)[1][1] == 0.5


def test_tensor_scalar_on_bits() -> None:
    dst = nl.ndarray((1, 2), nl.uint8)
    nisa.tensor_scalar(dst, tile([[0xF0, 0x0F]], nl.uint8), nl.bitwise_and, 0x3C, op1=nl.right_shift, operand1=2)
    assert got(dst) == [[0x0C, 0x03]]


def test_tensor_scalar_of_integers_is_exact() -> None:
    dst = nl.ndarray((1, 1), nl.int32)
    nisa.tensor_scalar(dst, tile([[2**24 + 1]], nl.int32), nl.multiply, 3, op1=nl.add, operand1=1)
    assert got(dst) == [[3 * (2**24 + 1) + 1]]


def test_scalar_tensor_tensor() -> None:
    dst = nl.ndarray((2, 2), nl.float32)
    args = (tile([[1, 2], [3, 4]]), nl.multiply, tile([[10], [100]]), nl.subtract, tile([[1, 1], [2, 2]]))
    nisa.scalar_tensor_tensor(dst, *args)
    assert got(dst) == [[9, 19], [298, 398]]
    nisa.scalar_tensor_tensor(dst, *args, reverse1=True)
    assert got(dst) == [[-9, -19], [-298, -398]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("add", [6, -6]), ("maximum", [3, -1]), ("minimum", [1, -3]), ("multiply", [6, -6]), ("subtract", [-4, 4]),
     ("logical_and", [1, 1]), ("logical_or", [1, 1])],
)  # fmt: skip
def test_tensor_reduce(name: str, expected: list[float]) -> None:
    dst = nl.ndarray((2, 1), nl.float32)
    nisa.tensor_reduce(dst, getattr(nl, name), tile([[1, 2, 3], [-1, -2, -3]]), axis=1)
    assert got(dst) == [[one] for one in expected]


def test_tensor_reduce_takes_trailing_axes_and_negates() -> None:
    data = tile(np.arange(8).reshape(1, 2, 4))
    last, both = nl.ndarray((1, 2), nl.float32), nl.ndarray((1, 1), nl.float32)
    nisa.tensor_reduce(last, nl.add, data, axis=2)
    nisa.tensor_reduce(both, nl.maximum, data, axis=(1, 2), negate=True)
    assert got(last) == [[6, 22]] and got(both) == [[-7]]


def test_tensor_scalar_reduce_accumulates_over_calls() -> None:
    dst, total = nl.ndarray((1, 2), nl.float32), nl.ndarray((1, 1), nl.float32)
    nisa.tensor_scalar_reduce(dst, tile([[1, 2]]), nl.multiply, 2.0, nl.add, total)
    assert got(dst) == [[2, 4]] and got(total) == [[6]]
    nisa.tensor_scalar_reduce(dst, tile([[1, 2]]), nl.multiply, 2.0, nl.add, total, reduce_cmd=nisa.reduce_cmd.reduce)
    assert got(total) == [[12]]
    nisa.tensor_scalar_reduce(
        dst, tile([[1, 2]]), nl.add, 0.0, nl.add, total,
        reduce_cmd=nisa.reduce_cmd.load_reduce, reduce_init=100.0, reduce_res_negate=True,
    )  # fmt: skip
    assert got(total) == [[-103]]


def test_tensor_scalar_cumulative() -> None:
    dst = nl.ndarray((1, 4), nl.float32)
    nisa.tensor_scalar_cumulative(dst, tile([[1, 2, 3, 4]]), nl.multiply, nl.add, 2.0)
    assert got(dst) == [[2, 6, 12, 20]]
    nisa.tensor_scalar_cumulative(dst, tile([[1, 1, 1, 1]]), nl.add, nl.subtract, 0.0)
    assert got(dst) == [[1, 0, 1, 0]]  # op1(new, so far)


def test_tensor_tensor_scan() -> None:
    dst = nl.ndarray((1, 3), nl.float32)
    data0, data1 = tile([[2, 3, 4]]), tile([[1, 1, 1]])
    nisa.tensor_tensor_scan(dst, data0, data1, 10.0, nl.multiply, nl.add)
    assert got(dst) == [[21, 64, 257]]
    nisa.tensor_tensor_scan(dst, data0, data1, tile([[10.0]]), nl.subtract, nl.add, reverse0=True)
    assert got(dst) == [[10 - 2 + 1, 9 - 3 + 1, 7 - 4 + 1]]


def test_reciprocal() -> None:
    dst = nl.ndarray((1, 3), nl.float32)
    nisa.reciprocal(dst, tile([[2, -4, 0]]))
    assert got(dst) == [[0.5, -0.25, math.inf]]


def test_bn_stats_and_bn_aggr() -> None:
    """Even elements 1 5 (mean 3, spread 8), odd ones 2 4 (mean 3, spread 2)."""
    stats, both = nl.ndarray((1, 6), nl.float32), nl.ndarray((1, 2), nl.float32)
    nisa.bn_stats(stats, tile([[1, 2, 5, 4]]))
    assert got(stats) == [[2, 3, 8, 2, 3, 2]]
    nisa.bn_aggr(both, stats)
    assert got(both) == [[3, 2.5]]


def test_bn_aggr_of_unequal_parts() -> None:
    both = nl.ndarray((1, 2), nl.float32)
    nisa.bn_aggr(both, tile([[1, 0, 0, 3, 4, 0]]))  # 0, and 4 three times
    assert got(both) == [[3, 3]]


def test_nc_stream_shuffle_within_quadrants() -> None:
    src, dst = tile(np.arange(64).reshape(64, 1)), tile(np.full((64, 1), -1))
    nisa.nc_stream_shuffle(dst, src, [5, 0] + [255] * 30)
    rows = [row[0] for row in got(dst)]
    assert rows[:3] == [5, 0, -1] and rows[32:35] == [37, 32, -1]


def test_exponential(gen4: None) -> None:
    dst, total = nl.ndarray((1, 2), nl.float32), nl.ndarray((1, 1), nl.float32)
    nisa.exponential(dst, tile([[1, 2]]), tile([[2.0]]), total, nisa.reduce_cmd.reset_reduce)
    assert got(dst)[0] == pytest.approx([math.exp(-1), 1]) and got(total)[0][0] == pytest.approx(1 + math.exp(-1))


# Choosing and searching


def test_tensor_copy_predicated() -> None:
    dst = tile([[1, 2, 3]])
    nisa.tensor_copy_predicated(dst, tile([[10, 20, 30]]), tile([[0, 1, 7]], nl.uint8))
    assert got(dst) == [[1, 20, 30]]
    nisa.tensor_copy_predicated(dst, -1.0, tile([[0, 1, 7]], nl.uint8), reverse_pred=True)
    assert got(dst) == [[-1, 20, 30]]


def test_range_select() -> None:
    dst, top = nl.ndarray((2, 4), nl.float32), nl.ndarray((2, 1), nl.float32)
    nisa.range_select(
        dst, tile([[1, 2, 3, 4], [8, 7, 6, 5]]), nl.greater_equal, nl.less, tile([[11], [10]]), tile([[13], [11]]),
        reduce_res=top, range_start=10,
    )  # fmt: skip
    low = float(np.finfo(np.float32).min)
    assert got(dst) == [[low, 2, 3, low], [8, low, low, low]] and got(top) == [[3], [8]]


def test_select_reduce() -> None:
    dst, top = nl.ndarray((1, 3), nl.float32), nl.ndarray((1, 1), nl.float32)
    nisa.select_reduce(dst, tile([[1, 0, 1]], nl.uint8), tile([[1, 9, 3]]), -5.0, top, nisa.reduce_cmd.reset_reduce)
    assert got(dst) == [[1, -5, 3]] and got(top) == [[3]]
    nisa.select_reduce(dst, tile([[1, 0, 1]], nl.uint8), tile([[1, 9, 3]]), tile([[-5.0]]), reverse_pred=True)
    assert got(dst) == [[-5, 9, -5]]


def test_max8_descends_and_keeps_duplicates() -> None:
    dst = nl.ndarray((1, 8), nl.float32)
    nisa.max8(dst, tile([[3, 9, 1, 9, 4, 0, 2, 7, 5, 6]]))
    assert got(dst) == [[9, 9, 7, 6, 5, 4, 3, 2]]


def test_nc_find_index8_gives_duplicates_ascending_places_and_a_sentinel() -> None:
    dst = nl.ndarray((1, 8), nl.uint16)
    nisa.nc_find_index8(dst, tile([[3, 9, 1, 9, 4, 0, 2, 7]]), tile([[9, 9, 9, 3, 7, 100, 0, 2]]))
    assert got(dst) == [[1, 3, 0xFFFF, 0, 7, 0xFFFF, 5, 6]]


def test_nc_match_replace8_gives_duplicates_descending_places() -> None:
    """The example of the reference: duplicates take the highest column first."""
    data, vals = tile([[1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8]]), tile([[3, 8, 8, 8, 8, 8, 8, 8]])
    dst, places = nl.ndarray((1, 11), nl.float32), nl.ndarray((1, 8), nl.uint32)
    nisa.nc_match_replace8(dst, data, vals, 0.0, places)
    assert got(places) == [[2, 10, 9, 8, 7, 6, 5, 4]]
    assert got(dst) == [[1, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0]]


# Scalar engine


def _swish_slope(x: float) -> float:
    """d/dx of x * sigmoid(1.702 x)."""
    s = 1 / (1 + math.exp(-1.702 * x))
    return s + 1.702 * x * s * (1 - s)


_ACTIVATIONS = {
    "copy": [-1, 0.5], "square": [1, 0.25], "relu": [0, 0.5], "abs": [1, 0.5], "sign": [-1, 1],
    "exp": [math.exp(-1), math.exp(0.5)], "tanh": [math.tanh(-1), math.tanh(0.5)],
    "sigmoid": [1 / (1 + math.e), 1 / (1 + math.exp(-0.5))],
    "silu": [-1 / (1 + math.e), 0.5 / (1 + math.exp(-0.5))],
    "gelu": [-0.15865525, 0.34573123], "gelu_apprx_tanh": [-0.15880801, 0.34571401],
    "gelu_apprx_sigmoid": [-1 / (1 + math.exp(1.702)), 0.5 / (1 + math.exp(-0.851))],
    "erf": [math.erf(-1), math.erf(0.5)], "erf_dx": [0.41510750, 0.87878257],
    "softplus": [math.log1p(math.exp(-1)), math.log1p(math.exp(0.5))],
    "mish": [-0.30340147, 0.37524524], "sin": [math.sin(-1), math.sin(0.5)], "arctan": [math.atan(-1), math.atan(0.5)],
    "reciprocal": [-1, 2], "gelu_dx": [-0.08331547, 0.86749512], "silu_dx": [0.07232949, 0.73996122],
    "gelu_apprx_sigmoid_dx": [_swish_slope(-1), _swish_slope(0.5)],
}  # fmt: skip


@pytest.mark.parametrize("name", _ACTIVATIONS)
def test_activation_functions(name: str) -> None:
    dst = nl.ndarray((1, 2), nl.float32)
    nisa.activation(dst, getattr(nl, name), tile([[-1, 0.5]]))
    assert got(dst)[0] == pytest.approx(_ACTIVATIONS[name], rel=2e-6, abs=2e-7)


@pytest.mark.parametrize(("name", "expected"), [("sqrt", 1.5), ("rsqrt", 2 / 3), ("log", math.log(2.25))])
def test_activation_functions_of_positive_numbers(name: str, expected: float) -> None:
    dst = nl.ndarray((1, 1), nl.float32)
    nisa.activation(dst, getattr(nl, name), tile([[2.25]]))
    assert got(dst)[0][0] == pytest.approx(expected, rel=1e-6)


def test_sine_of_the_scalar_engine_is_poison_beyond_pi() -> None:
    dst = nl.ndarray((1, 2), nl.float32)
    nisa.activation(dst, nl.sin, tile([[3.0, 9.0]]))
    assert not math.isnan(got(dst)[0][0]) and math.isnan(got(dst)[0][1])
    assert got(nl.sin(tile([[9.0]])))[0][0] == pytest.approx(math.sin(9), rel=1e-5)


def test_activation_scales_then_biases_then_reduces() -> None:
    dst, total = nl.ndarray((2, 2), nl.float32), nl.ndarray((2, 1), nl.float32)
    nisa.activation(
        dst, nl.square, tile([[1, 2], [3, 4]]), bias=tile([[1], [0]]), scale=tile([[2], [1]]),
        reduce_op=nl.add, reduce_res=total, reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )  # fmt: skip
    assert got(dst) == [[9, 25], [9, 16]] and got(total) == [[34], [25]]
    nisa.activation(dst, nl.copy, tile([[1, 1], [1, 1]]), reduce_op=nl.add, reduce_cmd=nisa.reduce_cmd.reduce)
    nisa.activation(dst, nl.copy, tile([[0, 0], [0, 0]]), reduce_res=total)
    assert got(total) == [[36], [27]]


def test_activation_reduce_starts_from_zero() -> None:
    dst, total = nl.ndarray((1, 2), nl.float32), nl.ndarray((1, 1), nl.float32)
    for _ in range(2):
        nisa.activation_reduce(dst, nl.copy, tile([[1, 2]]), nl.add, total, scale=3.0)
        assert got(dst) == [[3, 6]] and got(total) == [[9]]


def test_activate2(gen4: None) -> None:
    dst, top = nl.ndarray((1, 2), nl.float32), nl.ndarray((1, 1), nl.float32)
    nisa.activate2(
        dst, nl.relu, tile([[1, -3]]), 2.0, 1.0, nl.multiply, nl.subtract,
        reduce_op=nl.maximum, reduce_res=top, reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )  # fmt: skip
    assert got(dst) == [[1, 0]] and got(top) == [[1]]
    nisa.activate2(dst, nl.prelu, tile([[1, -3]]), 0.0, 0.0, nl.bypass, nl.bypass, relu_param=0.5)
    assert got(dst) == [[1, -1.5]]
    nisa.activate2(dst, nl.copy, tile([[1, -3]]), 2.0, 0.0, nl.subtract, nl.bypass, reverse0=True)
    assert got(dst) == [[1, 5]]


# GpSimd engine


def test_iota_walks_the_pattern_and_adds_the_partition() -> None:
    dst = nl.ndarray((2, 2, 3), nl.int32)
    nisa.iota(dst, [[10, 2], [1, 3]], offset=5, channel_multiplier=100)
    assert got(dst) == [[[5, 6, 7], [15, 16, 17]], [[105, 106, 107], [115, 116, 117]]]
    down = nl.ndarray((1, 4), nl.float32)
    nisa.iota(down, [[-1, 4]])
    assert got(down) == [[0, -1, -2, -3]]


def test_affine_select_is_a_causal_mask() -> None:
    dst = nl.ndarray((3, 3), nl.float32)
    nisa.affine_select(dst, [[-1, 3]], 1, tile(np.arange(9).reshape(3, 3)), -9.0, cmp_op=nl.greater_equal)
    assert got(dst) == [[0, -9, -9], [3, 4, -9], [6, 7, 8]]
    nisa.affine_select(dst, [[1, 3]], -1, tile(np.ones((3, 3))), 0.0, offset=-1)
    assert got(dst) == [[0, 1, 0], [0, 0, 1], [0, 0, 0]]  # equal is the default comparison


def test_positional_order_of_nki_0_2() -> None:
    dst = nl.ndarray((2, 2), nl.float32)
    nisa.affine_select(dst, [[1, 2]], -1, 0, tile([[1, 2], [3, 4]]), -9.0)
    assert got(dst) == [[-9, 2], [-9, 4]]  # offset -1 along the row: equal to zero in column 1
    nisa.affine_select(dst, [[1, 2]], -1, 0, tile([[1, 2], [3, 4]]), -9.0, nl.less)
    assert got(dst) == [[1, -9], [3, -9]]
    nisa.dma_compute(dst, [hbm([[1, 2], [3, 4]])], [1.0], nl.add)
    assert got(dst) == [[1, 2], [3, 4]]


def test_tensor_partition_reduce() -> None:
    dst = nl.ndarray((1, 2), nl.float32)
    for op, expected in ((nl.add, [9, 12]), (nl.maximum, [5, 6]), (nl.average, [3, 4])):
        nisa.tensor_partition_reduce(dst, op, tile([[1, 2], [3, 4], [5, 6]]))
        assert got(dst) == [expected]


def test_nc_n_gather_within_partitions() -> None:
    dst = nl.ndarray((2, 3), nl.float32)
    nisa.nc_n_gather(dst, tile([[1, 2, 3, 4], [5, 6, 7, 8]]), tile([[3, 0, 0], [1, 1, 2]], nl.uint32))
    assert got(dst) == [[4, 1, 1], [6, 6, 7]]


def test_local_gather_reads_indices_partition_first() -> None:
    data = tile(np.arange(16 * 40).reshape(16, 40))
    index = tile(np.arange(32).reshape(2, 16).T, nl.uint16)  # [16, 2]: column by column 0, 1, ..., 31
    dst = nl.ndarray((16, 32), nl.float32)
    nisa.local_gather(dst, data, index)
    assert got(dst)[0] == list(range(32)) and got(dst)[3][:2] == [120, 121]
    pairs = nl.ndarray((16, 6), nl.float32)
    nisa.local_gather(pairs, data, index, num_elem_per_idx=2, num_valid_indices=3)
    assert got(pairs)[0] == [0, 1, 1, 2, 2, 3]


def test_sequence_bounds() -> None:
    dst = nl.ndarray((1, 2, 6), nl.int32)
    nisa.sequence_bounds(dst, tile([[1, 1, 2, 0, 3, 3]], nl.int32))
    assert got(dst) == [[[0, 0, 2, 6, 4, 4], [2, 2, 3, -1, 6, 6]]]


def test_nonzero_with_count_touches_every_sixteenth_partition() -> None:
    src = np.zeros((32, 8))
    src[0], src[16] = [0, 1, 1, 0, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]
    dst = nl.ndarray((32, 9), nl.int32)
    nisa.nonzero_with_count(dst, tile(src), index_offset=16, padding_val=-1)
    assert got(dst)[0] == [17, 18, 21, -1, -1, -1, -1, -1, 3]
    assert got(dst)[16] == [16, -1, -1, -1, -1, -1, -1, -1, 1]
    assert got(dst)[1] == [4] * 9


def test_topk_ascends() -> None:
    src = np.zeros((16, 1))
    src[:, 0] = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]
    val, idx = nl.ndarray((16, 3), nl.bfloat16), nl.ndarray((16, 3), nl.uint32)
    nisa.topk(val, idx, tile(src, nl.bfloat16), n=8)
    assert got(val)[0] == [5, 6, 9] and got(idx)[0] == [4, 7, 5] and got(idx)[15] == [4, 7, 5]


# Registers, random numbers, microscaling


def test_registers() -> None:
    reg = nisa.register_alloc()
    nisa.register_load(reg, tile([[7]], nl.int32))
    out = nl.ndarray((1, 1), nl.int32)
    nisa.register_store(out, reg)
    assert int(reg) == 7 and got(out) == [[7]]
    nisa.register_move(reg, nisa.register_alloc(-2))
    assert int(reg) == -2
    nisa.register_move(reg, imm=3)
    assert list(map(int, nl.dynamic_range(reg))) == [0, 1, 2]
    assert int(nisa.register_alloc(tile([[9]], nl.int32))) == 9


def test_random_numbers_repeat_with_their_seed_and_fit_their_range() -> None:
    first, second = nl.ndarray((4, 64), nl.uint8), nl.ndarray((4, 64), nl.uint8)
    for dst in (first, second):
        nisa.set_rng_seed(tile([[42]], nl.int32))
        nisa.rng(dst)
    assert got(first) == got(second) and len(set(np.ravel(got(first)))) > 60


@pytest.mark.parametrize("name", ["rand_set_state", "rand_get_state"])
def test_the_state_of_the_hardwares_generator_is_refused(name: str) -> None:
    with pytest.raises(nisa.NkiValidationError, match="no meaning here"):
        getattr(nisa, name)(nl.ndarray((128, 6), nl.uint32))


def test_every_instruction_has_a_test() -> None:
    here = Path(__file__).read_text()
    names = [name for name in nisa.__all__ if inspect.isfunction(getattr(nisa, name)) and not name.startswith("get_")]
    assert len(names) >= 45
    # The first and the last are in test_nki_launch, the two between are refused above.
    others = ["core_barrier", "rand_get_state", "rand_set_state", "sendrecv"]
    assert [name for name in names if f"nisa.{name}(" not in here] == others


def test_dropout_of_none_and_of_all() -> None:
    dst = nl.ndarray((1, 64), nl.float32)
    data = tile(np.arange(1, 65).reshape(1, 64))
    nisa.dropout(dst, data, 0.0)
    assert got(dst) == got(data)
    nisa.dropout(dst, data, 1.0)
    assert not np.any(got(dst))
    nisa.dropout(dst, data, tile([[0.5]]))
    assert 10 < np.count_nonzero(got(dst)) < 54


def test_rand2(gen4: None) -> None:
    dst = nl.ndarray((2, 64), nl.float32)
    nisa.rand2(dst, 3.0, tile([[4.0], [5.0]]))
    assert np.min(got(dst)) >= 3 and np.max(got(dst)[0]) <= 4 < np.max(got(dst)[1]) <= 5


def test_quantize_mx_and_its_matmul(gen4: None) -> None:
    """A group of 8 partitions times 4 values: largest 4 gives scale 2^(2 - (8 - 1)) = 2^-5, held as 127 - 5."""
    values = np.ones((32, 8), np.float32)
    values[0, 0] = 4
    data, scale = nl.ndarray((32, 2), nl.float8_e4m3fn_x4), nl.zeros((32, 2), nl.uint8)
    nisa.quantize_mx(data, tile(values, nl.bfloat16), scale)
    assert got(scale)[0] == [122, 120] and got(scale)[1] == [120, 120]
    first = np.uint32(data.read()[0, 0]).tobytes()
    assert np.frombuffer(first, ml_dtypes.float8_e4m3fn).astype(float).tolist() == [128, 32, 32, 32]
    dst = nl.ndarray((2, 2), nl.float32, nl.psum)
    nisa.nc_matmul_mx(dst, data, data, scale, scale)
    assert got(dst) == [[128 - 1 + 16, 128 + 3], [128 + 3, 128]]
