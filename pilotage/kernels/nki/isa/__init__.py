"""The instructions, `nki.isa`: one file an engine."""

from __future__ import annotations

from pilotage.kernels.nki.faults import NkiValidationError
from pilotage.kernels.nki.hardware import nc_version
from pilotage.kernels.nki.isa import constants
from pilotage.kernels.nki.isa.constants import (
    dge_mode,
    dma_engine,
    engine,
    get_nc_sub_version,
    get_nc_version,
    gpsimd_engine,
    matmul_perf_mode,
    oob_mode,
    reduce_cmd,
    scalar_engine,
    tensor_engine,
    unknown_engine,
    vector_engine,
)
from pilotage.kernels.nki.isa.dma import dma_compute, dma_copy, dma_transpose
from pilotage.kernels.nki.isa.gpsimd import (
    affine_select,
    iota,
    local_gather,
    nc_n_gather,
    nonzero_with_count,
    sequence_bounds,
    tensor_partition_reduce,
    topk,
)
from pilotage.kernels.nki.isa.mx import nc_matmul_mx, quantize_mx
from pilotage.kernels.nki.isa.random import dropout, rand2, rand_get_state, rand_set_state, rng, set_rng_seed
from pilotage.kernels.nki.isa.registers import (
    VirtualRegister,
    register_alloc,
    register_load,
    register_move,
    register_store,
)
from pilotage.kernels.nki.isa.scalar import activate2, activation, activation_reduce
from pilotage.kernels.nki.isa.scans import tensor_scalar_cumulative, tensor_tensor_scan
from pilotage.kernels.nki.isa.search import max8, nc_find_index8, nc_match_replace8
from pilotage.kernels.nki.isa.selecting import range_select, select_reduce, tensor_copy_predicated
from pilotage.kernels.nki.isa.statistics import bn_aggr, bn_stats
from pilotage.kernels.nki.isa.sync import core_barrier, sendrecv
from pilotage.kernels.nki.isa.tensor import nc_matmul, nc_transpose
from pilotage.kernels.nki.isa.vector import (
    exponential,
    memset,
    nc_stream_shuffle,
    reciprocal,
    scalar_tensor_tensor,
    tensor_copy,
    tensor_reduce,
    tensor_scalar,
    tensor_scalar_reduce,
    tensor_tensor,
)

__all__ = [
    "NkiValidationError",
    "VirtualRegister",
    "activate2",
    "activation",
    "activation_reduce",
    "affine_select",
    "bn_aggr",
    "bn_stats",
    "constants",
    "core_barrier",
    "dge_mode",
    "dma_compute",
    "dma_copy",
    "dma_engine",
    "dma_transpose",
    "dropout",
    "engine",
    "exponential",
    "get_nc_sub_version",
    "get_nc_version",
    "gpsimd_engine",
    "iota",
    "local_gather",
    "matmul_perf_mode",
    "max8",
    "memset",
    "nc_find_index8",
    "nc_match_replace8",
    "nc_matmul",
    "nc_matmul_mx",
    "nc_n_gather",
    "nc_stream_shuffle",
    "nc_transpose",
    "nc_version",
    "nonzero_with_count",
    "oob_mode",
    "quantize_mx",
    "rand2",
    "rand_get_state",
    "rand_set_state",
    "range_select",
    "reciprocal",
    "reduce_cmd",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "rng",
    "scalar_engine",
    "scalar_tensor_tensor",
    "select_reduce",
    "sendrecv",
    "sequence_bounds",
    "set_rng_seed",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_engine",
    "tensor_partition_reduce",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_scalar_cumulative",
    "tensor_scalar_reduce",
    "tensor_tensor",
    "tensor_tensor_scan",
    "topk",
    "unknown_engine",
    "vector_engine",
]
