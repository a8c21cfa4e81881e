"""What the hardware has no room for is refused, with the line of the kernel that asked."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import numpy as np
import pytest

from pilotage.kernels.nki import NkiValidationError, collectives, simulate
from pilotage.kernels.nki import isa as nisa
from pilotage.kernels.nki import language as nl

HBM = np.zeros((128, 1024), np.float32)


def _line(kernel: Callable[..., object], marker: str) -> int:
    lines, first = inspect.getsourcelines(kernel)
    return first + next(at for at, line in enumerate(lines) if marker in line)


def _sbuf(*shape: int, dtype: object = nl.float32) -> object:
    return nl.zeros(shape, dtype)


def too_many_partitions(x: object) -> None:
    nl.ndarray((129, 4), nl.float32)  # here


def sbuf_too_small(x: object) -> None:
    nl.ndarray((1, 60_000), nl.float32)  # here


def psum_too_small(x: object) -> None:
    nl.ndarray((128, 4097), nl.float32, nl.psum)  # here


def flat_on_chip(x: object) -> None:
    nl.ndarray((128,), nl.float32)  # here


def moving_too_wide(x: object) -> None:
    dst = nl.ndarray((8, 513), nl.float32, nl.psum)
    nisa.nc_matmul(dst, _sbuf(128, 8), _sbuf(128, 513))  # here


def stationary_too_wide(x: object) -> None:
    dst = nl.ndarray((128, 8), nl.float32, nl.psum)
    nisa.nc_matmul(dst, _sbuf(128, 129), _sbuf(128, 8))  # here


def contraction_unequal(x: object) -> None:
    dst = nl.ndarray((4, 4), nl.float32, nl.psum)
    nisa.nc_matmul(dst, _sbuf(64, 4), _sbuf(32, 4))  # here


def crosses_banks(x: object) -> None:
    dst = nl.ndarray((128, 1024), nl.float32, nl.psum)
    nisa.nc_matmul(dst[:, 256:768], _sbuf(128, 128), _sbuf(128, 512))  # here


def matmul_into_sbuf(x: object) -> None:
    nisa.nc_matmul(_sbuf(4, 4), _sbuf(8, 4), _sbuf(8, 4))  # here


def matmul_of_integers(x: object) -> None:
    dst = nl.ndarray((4, 4), nl.float32, nl.psum)
    nisa.nc_matmul(dst, _sbuf(8, 4, dtype=nl.int32), _sbuf(8, 4))  # here


def matmul_mixes_widths(x: object) -> None:
    dst = nl.ndarray((4, 4), nl.float32, nl.psum)
    nisa.nc_matmul(dst, _sbuf(8, 4, dtype=nl.bfloat16), _sbuf(8, 4))  # here


def matmul_accumulates_onto_nothing(x: object) -> None:
    dst = nl.ndarray((4, 4), nl.float32, nl.psum)
    nisa.nc_matmul(dst, _sbuf(8, 4), _sbuf(8, 4), accumulate=True)  # here


def matmul_accumulates_onto_dirt(x: object) -> None:
    dst = nl.ndarray((4, 4), nl.float32, nl.psum)
    nisa.memset(dst, 1.0)
    nisa.nc_matmul(dst, _sbuf(8, 4), _sbuf(8, 4))  # here


def transpose_too_large(x: object) -> None:
    dst = nl.ndarray((128, 128), nl.float32, nl.psum)
    nisa.nc_transpose(dst, _sbuf(128, 256)[:, 0:129])  # here


def vector_transpose_too_large(x: object) -> None:
    nisa.nc_transpose(_sbuf(33, 33), _sbuf(33, 33), engine=nisa.engine.vector)  # here


def starts_between_quadrants(x: object) -> None:
    nisa.tensor_copy(_sbuf(128, 4)[16:48], _sbuf(32, 4))  # here


def sixty_four_start_at_thirty_two(x: object) -> None:
    nisa.tensor_copy(_sbuf(128, 4)[32:96], _sbuf(64, 4))  # here


def both_in_psum(x: object) -> None:
    one, two = nl.zeros((4, 4), nl.float32, nl.psum), nl.zeros((4, 4), nl.float32, nl.psum)
    nisa.tensor_tensor(_sbuf(4, 4), one, two, nl.add)  # here


def gpsimd_in_psum(x: object) -> None:
    nisa.memset(nl.ndarray((4, 4), nl.float32, nl.psum), 0.0, engine=nisa.engine.gpsimd)  # here


def dma_from_psum(x: object) -> None:
    nisa.dma_copy(dst=_sbuf(4, 4), src=nl.zeros((4, 4), nl.float32, nl.psum))  # here


def dma_of_unequal_sizes(x: object) -> None:
    nisa.dma_copy(dst=_sbuf(4, 4), src=x[0:4, 0:5])  # here


def dma_index_out_of_range(x: object) -> None:
    rows = x.ap([[1024, 1], [1, 4]], vector_offset=nl.full((1, 1), 128, nl.int32), indirect_dim=0)
    nisa.dma_copy(dst=_sbuf(1, 4), src=rows)  # here


def dma_scalar_out_of_range(x: object) -> None:
    rows = x.ap([[1024, 1], [1, 4]], scalar_offset=nl.full((1, 1), 500, nl.int32), indirect_dim=0)
    nisa.dma_copy(dst=_sbuf(1, 4), src=rows)  # here


def hardware_descriptors_convert(x: object) -> None:
    nisa.dma_copy(dst=_sbuf(4, 4, dtype=nl.bfloat16), src=x[0:4, 0:4], dge_mode=nisa.dge_mode.hwdge)  # here


def slice_out_of_range(x: object) -> None:
    x[0:200, :]  # here


def pattern_skips_partitions(x: object) -> None:
    _sbuf(16, 32).ap([[64, 8], [1, 32]])  # here


def pattern_leaves_the_tensor(x: object) -> None:
    nisa.tensor_copy(_sbuf(16, 32), _sbuf(16, 32).ap([[32, 16], [1, 32]], offset=1))  # here


def reduce_the_partition(x: object) -> None:
    nisa.tensor_reduce(_sbuf(1, 4), nl.add, _sbuf(8, 4), axis=0)  # here


def reduce_a_middle_axis(x: object) -> None:
    nisa.tensor_reduce(_sbuf(8, 2), nl.add, nl.zeros((8, 4, 2), nl.float32), axis=1)  # here


def mixed_kinds_of_operators(x: object) -> None:
    data = _sbuf(4, 4, dtype=nl.int32)
    nisa.tensor_scalar(data, data, nl.add, 1, op1=nl.bitwise_and, operand1=1)  # here


def bits_of_floats(x: object) -> None:
    nisa.tensor_scalar(_sbuf(4, 4), _sbuf(4, 4), nl.bitwise_and, 1)  # here


def operator_of_no_engine(x: object) -> None:
    nisa.tensor_tensor(_sbuf(4, 4), _sbuf(4, 4), _sbuf(4, 4), nl.divide)  # here


def function_of_no_engine(x: object) -> None:
    nisa.activation(_sbuf(4, 4), nl.cos, _sbuf(4, 4))  # here


def operand_of_wrong_length(x: object) -> None:
    nisa.tensor_scalar(_sbuf(4, 4), _sbuf(4, 4), nl.add, _sbuf(4, 2))  # here


def memset_of_a_fraction(x: object) -> None:
    nisa.memset(_sbuf(4, 4, dtype=nl.int32), 1.5)  # here


def max8_of_seven(x: object) -> None:
    nisa.max8(_sbuf(4, 8), _sbuf(4, 7))  # here


def bn_stats_of_too_many(x: object) -> None:
    nisa.bn_stats(_sbuf(4, 6), _sbuf(4, 513))  # here


def instruction_of_a_later_core(x: object) -> None:
    nisa.exponential(_sbuf(4, 4), _sbuf(4, 4))  # here


def microscaling_of_a_later_core(x: object) -> None:
    values, scales = _sbuf(32, 8, dtype=nl.bfloat16), _sbuf(4, 2, dtype=nl.uint8)
    nisa.quantize_mx(_sbuf(32, 2, dtype=nl.float8_e5m2_x4), values, scales)  # here


def indirection_of_a_later_language(x: object) -> None:
    _sbuf(16, 8).indirect(_sbuf(16, 1, dtype=nl.uint16))  # here


def collective_of_one_device(x: object) -> None:
    collectives.all_reduce(srcs=[x], dsts=[x], replica_group=collectives.ReplicaGroup([[0]]), op=nl.add)  # here


def barrier_alone(x: object) -> None:
    nisa.core_barrier(nl.ndarray((1, 1), nl.float32, nl.shared_hbm), (0, 1))  # here


def arithmetic_on_tiles(x: object) -> None:
    _sbuf(4, 4) + _sbuf(4, 4)  # here


def reshape_across_partitions(x: object) -> None:
    _sbuf(4, 4).reshape((2, 8))  # here


def writes_a_loop_counter(x: object) -> None:
    for i in nl.dynamic_range(2):
        nisa.register_move(i, 3)  # here


def returns_a_tile(x: object) -> object:
    return _sbuf(4, 4)


_KERNELS = [
    one for one in list(globals().values()) if inspect.isfunction(one) and inspect.getsource(one).count("# here")
]


@pytest.mark.parametrize(
    "kernel", [one for one in _KERNELS if not one.__name__.startswith("test")], ids=lambda k: k.__name__
)
def test_refused_with_the_line(kernel: Callable[..., object]) -> None:
    with pytest.raises(NkiValidationError) as caught:
        simulate(kernel)(HBM)
    line = _line(kernel, "# here")
    assert f"{__file__}:{line} in {kernel.__name__}" in str(caught.value)


def test_a_result_on_chip_is_refused() -> None:
    with pytest.raises(NkiValidationError, match="returns"):
        simulate(returns_a_tile)(HBM)


def test_unknown_types_are_refused() -> None:
    with pytest.raises(NkiValidationError, match="not a data type"):
        simulate(returns_a_tile)(np.zeros((2, 2), np.float64))
