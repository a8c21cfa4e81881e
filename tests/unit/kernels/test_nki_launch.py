"""Launching kernels: arguments and results, both cores, the import names, precision, NKI 0.1."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from pilotage.core.errors import Unavailable
from pilotage.kernels.nki import NkiValidationError, jit, simulate, uninstall
from pilotage.kernels.nki import isa as nisa
from pilotage.kernels.nki import language as nl
from pilotage.kernels.nki.legacy import isa as old_nisa
from pilotage.kernels.nki.legacy import language as old_nl
from pilotage.kernels.nki.names import _legacy_jit as old_jit


def double(x: nl.tensor, factor: float = 2.0) -> nl.tensor:
    tile = nl.ndarray(x.shape, x.dtype)
    nisa.dma_copy(dst=tile, src=x)
    nisa.tensor_scalar(tile, tile, nl.multiply, factor)
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int32])
def test_torch_in_torch_out(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, -4.0]]).to(dtype)
    out = simulate(double)(x)
    assert out.dtype is dtype and out.float().tolist() == [[2, 4], [6, -8]]


def test_numpy_in_numpy_out() -> None:
    out = simulate(double)(np.ones((2, 2), ml_dtypes.bfloat16), factor=3.0)
    assert out.dtype == ml_dtypes.bfloat16 and out.astype(float).tolist() == [[3, 3], [3, 3]]


def test_writes_in_place_reach_the_argument_contiguous_or_not() -> None:
    def fill(x: nl.tensor) -> nl.tensor:
        tile = nl.full((2, 2), 7.0, nl.float32)
        nisa.dma_copy(dst=x, src=tile)
        return x

    x = torch.zeros(2, 2)
    assert simulate(fill)(x) is x and x.tolist() == [[7, 7], [7, 7]]
    wide = torch.zeros(2, 4)
    simulate(fill)(wide[:, ::2])
    assert wide.tolist() == [[7, 0, 7, 0], [7, 0, 7, 0]]


def test_without_simulator_a_kernel_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NKI_SIMULATOR", raising=False)
    with pytest.raises(Unavailable, match="NKI_SIMULATOR=1"):
        jit(double)(torch.ones(2, 2))
    monkeypatch.setenv("NKI_SIMULATOR", "1")
    assert jit(double)(torch.ones(2, 2)).tolist() == [[2, 2], [2, 2]]


def test_low_precision_is_kept_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def third(x: nl.tensor) -> nl.tensor:
        return double(x, 1 / 3)

    def error(value: object) -> float:
        return abs(float(np.asarray(simulate(third)(np.full((1, 1), 1, ml_dtypes.bfloat16)))[0, 0]) - 1 / 3)

    assert error(1) > 1e-4
    monkeypatch.setenv("NKI_PRECISE_FP", "0")
    held: list[float] = []

    def look(x: nl.tensor) -> None:
        tile = nl.ndarray(x.shape, nl.bfloat16)
        nisa.dma_copy(dst=tile, src=x)
        nisa.tensor_scalar(tile, tile, nl.multiply, 1 / 3)
        held.append(float(tile.read()[0, 0]))

    simulate(look)(np.full((1, 1), 1, ml_dtypes.bfloat16))
    assert abs(held[0] - 1 / 3) < 1e-7


# Two cores


def halves(x: nl.tensor) -> nl.tensor:
    """Each core doubles its half of a shared tensor, waits, and adds the other's."""
    rows = x.shape[0] // nl.num_programs(0)
    me = nl.program_id(0)
    shared = nl.ndarray(x.shape, x.dtype, nl.shared_hbm, name="shared")
    tile = nl.ndarray((rows, x.shape[1]), x.dtype)
    nisa.dma_copy(dst=tile, src=x[nl.ds(me * rows, rows)])
    nisa.tensor_scalar(tile, tile, nl.multiply, 2.0)
    nisa.dma_copy(dst=shared[nl.ds(me * rows, rows)], src=tile)
    nisa.core_barrier(shared, (0, 1))
    theirs = nl.ndarray((rows, x.shape[1]), x.dtype)
    nisa.dma_copy(dst=theirs, src=shared[nl.ds((1 - me) * rows, rows)])
    nisa.tensor_tensor(tile, tile, theirs, nl.add)
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    nisa.dma_copy(dst=out[nl.ds(me * rows, rows)], src=tile)
    return out


def test_both_cores_meet_at_the_barrier() -> None:
    x = torch.arange(8.0).reshape(4, 2)
    expected = 2 * (x + x.roll(2, 0))
    assert torch.equal(simulate(jit(halves)[2])(x), expected)


def test_a_missing_barrier_shows_as_nan() -> None:
    def racing(x: nl.tensor) -> nl.tensor:
        kept = nisa.core_barrier
        try:
            nisa.core_barrier = lambda *args: None
            return halves(x)
        finally:
            nisa.core_barrier = kept

    assert simulate(jit(racing)[2])(torch.ones(4, 2)).isnan().any()


def test_cores_exchange_tiles() -> None:
    def swap(x: nl.tensor) -> nl.tensor:
        me = nl.program_id()
        mine, theirs = nl.ndarray((1, 2), x.dtype), nl.ndarray((1, 2), x.dtype)
        nisa.dma_copy(dst=mine, src=x[nl.ds(me, 1)])
        for pipe in range(3):
            nisa.sendrecv(src=mine, dst=theirs, send_to_rank=1 - me, recv_from_rank=1 - me, pipe_id=pipe % 2)
            nisa.tensor_tensor(mine, mine, theirs, nl.add)
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        nisa.dma_copy(dst=out[nl.ds(me, 1)], src=theirs)
        return out

    assert simulate(jit(swap)[2])(torch.tensor([[1.0, 2], [10, 20]])).tolist() == [[22, 44], [22, 44]]


def test_the_core_that_failed_is_named_and_the_other_released() -> None:
    def one_fails(x: nl.tensor) -> None:
        if nl.program_id() == 1:
            nl.ndarray((129, 1), nl.float32)
        nisa.core_barrier(nl.ndarray((1, 1), nl.float32, nl.shared_hbm), (0, 1))

    with pytest.raises(NkiValidationError, match="129"):
        simulate(jit(one_fails)[2])(torch.ones(2, 2))


def test_more_cores_than_there_are() -> None:
    with pytest.raises(NkiValidationError, match="1 or 2 cores"):
        jit(double)[8]


# Import names


def _run(script: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(  # noqa: PLW1510 - the caller looks at what it printed
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)} | environment,
    )  # fmt: skip


def test_names_are_taken_under_the_simulator_and_left_to_the_real_package(tmp_path: Path) -> None:
    (tmp_path / "neuronxcc").mkdir()
    (tmp_path / "neuronxcc" / "__init__.py").write_text("real = True\n")
    done = _run(
        """
        import pilotage.kernels.nki as pn
        import nki, nki.isa as nisa, nki.language as nl
        from nki.isa.constants import oob_mode
        assert nki.jit is pn.jit and nl.add is pn.language.add and nisa.nc_matmul is pn.isa.nc_matmul
        import neuronxcc
        assert neuronxcc.real and pn.real("neuronxcc") and not pn.real("nki")
        try:
            import neuronxcc.nki
        except ImportError:
            print("left alone")
        pn.uninstall()
        try:
            import nki
        except ImportError:
            print("given back")
        """,
        tmp_path,
        NKI_SIMULATOR="1",
    )
    assert done.stdout.split("\n")[:2] == ["left alone", "given back"], done.stderr


def test_the_example_of_the_page_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "kernels-nki.md").read_text()
    try:
        exec(compile(page.split("```python\n")[1].split("```")[0], "kernels-nki.md", "exec"), {"__name__": "example"})
    finally:
        uninstall()
    assert capsys.readouterr().out.split() == ["[[2.", "2.", "2.]", "[2.", "2.", "2.]]"]


# NKI 0.1


def test_return_style_index_arrays_and_masks() -> None:
    @old_jit
    def tiled(x: nl.tensor) -> nl.tensor:
        out = old_nl.ndarray(x.shape, dtype=x.dtype, buffer=old_nl.shared_hbm)
        i_p, i_f = old_nl.mgrid[0:2, 0:2]
        for i in old_nl.affine_range(2):
            inside = (i_p + 2 * i < 3) & (i_f < 2)
            tile = old_nl.load(x[i_p + 2 * i, i_f], mask=inside)
            tile = old_nisa.tensor_scalar(tile, old_nl.add, 1.0, mask=inside)
            old_nl.store(out[i_p + 2 * i, i_f], old_nl.exp(tile * 0.0, mask=inside) + tile, mask=inside)
        return out

    assert simulate(tiled)(torch.tensor([[1.0, 2], [3, 4], [5, 6]])).tolist() == [[3, 4], [5, 6], [7, 8]]


def test_block_dimensions_and_accumulation_in_psum() -> None:
    @old_jit
    def blocks(x: nl.tensor) -> nl.tensor:
        tiles = old_nl.ndarray((2, old_nl.par_dim(2), 3), dtype=x.dtype, buffer=old_nl.sbuf)
        total = old_nl.zeros((3, 3), dtype=old_nl.float32, buffer=old_nl.psum)
        for i in old_nl.affine_range(2):
            tiles[i] = old_nl.load(x[i])
            total += old_nisa.nc_matmul(tiles[i], tiles[i])
        out = old_nl.ndarray((3, 3), dtype=x.dtype, buffer=old_nl.shared_hbm)
        old_nl.store(out, old_nisa.tensor_copy(total))
        return out

    x = torch.arange(12.0).reshape(2, 2, 3)
    assert torch.equal(simulate(blocks)(x), torch.einsum("bpi,bpj->ij", x, x))


def test_masked_reduction_leaves_out_what_the_mask_leaves_out() -> None:
    @old_jit
    def smallest(x: nl.tensor) -> nl.tensor:
        i_p, i_f = old_nl.mgrid[0:2, 0:4]
        tile = old_nl.load(x[i_p, i_f], mask=i_f < 3)
        out = old_nl.ndarray((2, 1), dtype=x.dtype, buffer=old_nl.shared_hbm)
        old_nl.store(out, old_nisa.tensor_reduce(np.min, tile[i_p, i_f], axis=1, mask=i_f < 3))
        return out

    assert simulate(smallest)(torch.tensor([[3.0, 1, 2], [9, 8, 7]])).tolist() == [[1], [7]]


def test_a_grid_of_programs_runs_them_all() -> None:
    @old_jit
    def each(x: nl.tensor) -> nl.tensor:
        out = old_nl.ndarray(x.shape, dtype=x.dtype, buffer=old_nl.shared_hbm)
        at = old_nl.program_id(0), old_nl.program_id(1)
        old_nl.store(out[at], old_nl.load(x[at]) * 2.0)
        return out

    x = torch.arange(8.0).reshape(2, 4, 1, 1)
    assert torch.equal(simulate(each[2, 4])(x), 2 * x)


_LANGUAGE = """
ndarray zeros ones full zeros_like empty_like shared_constant shared_identity_matrix load store ds affine_range
sequential_range static_range dynamic_range fori_loop while_loop program_id num_programs program_ndim sbuf psum hbm
private_hbm shared_hbm tile_size NKIObject tensor add subtract multiply divide maximum minimum abs abs_max power equal
not_equal less less_equal greater greater_equal logical_and logical_or bitwise_and left_shift copy exp log sqrt rsqrt
square reciprocal tanh sigmoid relu silu silu_dx gelu gelu_apprx_tanh gelu_apprx_sigmoid gelu_apprx_sigmoid_dx sin
float32 bfloat16 float16 tfloat32 float8_e4m3 float8_e4m3fn float8_e5m2 float8_e4m3fn_x4 float8_e5m2_x4
float4_e2m1fn_x4 int8 int16 int32 uint8 uint16 uint32 sum max min mean matmul transpose where softmax device_print
"""
_INSTRUCTIONS = """
dma_copy dma_transpose dma_compute tensor_copy tensor_copy_predicated tensor_tensor tensor_scalar tensor_reduce
tensor_scalar_reduce scalar_tensor_tensor tensor_tensor_scan tensor_partition_reduce memset activation
activation_reduce nc_matmul nc_matmul_mx nc_transpose nc_stream_shuffle nc_n_gather nc_find_index8 nc_match_replace8
max8 iota affine_select range_select select_reduce reciprocal bn_stats bn_aggr quantize_mx local_gather
nonzero_with_count sendrecv core_barrier register_alloc register_load register_move register_store get_nc_version
nc_version dge_mode oob_mode reduce_cmd matmul_perf_mode engine dma_engine vector_engine scalar_engine gpsimd_engine
tensor_engine NkiValidationError VirtualRegister
"""


def test_the_names_that_public_kernels_use_are_there() -> None:
    language, instructions = _LANGUAGE.split(), _INSTRUCTIONS.split()
    assert len(language) >= 65 and len(instructions) >= 45
    assert [name for name in language if not hasattr(nl, name)] == []
    assert [name for name in instructions if not hasattr(nisa, name)] == []
    assert [name for name in language if not hasattr(old_nl, name)] == []
