"""Three kernels with a common fault each; `pilotage kernels check` finds them all. See docs/kernels.md."""

import my_norm
import numpy as np
import torch
from torch import Tensor

import pilotage.functional as NF
from pilotage.kernels import launch_numpy, wrap_kernel, wrap_nki
from pilotage.kernels import nki as interpreter

interpreter.install()
import nki  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

EMULATOR = NF.Emulator(name="the NKI interpreter", how="NKI_SIMULATOR=1", active=interpreter.simulating)


@nki.jit
def rms_columns(x, weight, eps):
    tokens, width = x.shape
    out = nl.ndarray((tokens, width), dtype=x.dtype, buffer=nl.shared_hbm)
    for start in range(0, width, 128):
        count = min(128, width - start)
        tile = nl.ndarray((count, tokens), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=x.ap(pattern=[[1, count], [width, tokens]], offset=start))
        scale = nl.ndarray((count, 1), dtype=weight.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=scale, src=weight.ap(pattern=[[1, count], [1, 1]], offset=start))
        squares = nl.ndarray((count, tokens), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=squares, data1=tile, data2=tile, op=nl.multiply)
        size = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=size, op=nl.add, data=squares, axis=1)  # over tokens, the free dimension here
        nisa.tensor_scalar(dst=size, data=size, op0=nl.multiply, operand0=1.0 / tokens, op1=nl.add, operand1=eps)
        nisa.tensor_scalar(dst=size, data=size, op0=nl.rsqrt, operand0=0.0)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=size, op1=nl.multiply, operand1=scale)
        nisa.dma_copy(dst=out.ap(pattern=[[1, count], [width, tokens]], offset=start), src=tile)
    return out


wrong_axis = wrap_nki(rms_columns, fallback=my_norm.rms_rows_torch)


def rms_norm(x, weight, *, eps, unit_offset=False, round_once=False):
    return wrong_axis[1](x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)


NF.register(
    "rms_norm",
    "wrong_axis",
    rms_norm,
    domain=NF.Domain(targets=("neuron",), emulator=EMULATOR, options={"unit_offset": (False,)}),
    priority=40,
    language="NKI",
)


@nki.jit
def project(x, weight):
    tokens, width = x.shape
    outputs = weight.shape[0]
    out = nl.ndarray((tokens, outputs), dtype=x.dtype, buffer=nl.shared_hbm)
    sums = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)  # one for all tiles
    for first in range(0, outputs, 512):
        count = min(512, outputs - first)
        for start in range(0, tokens, 128):
            rows = min(128, tokens - start)
            for at in range(0, width, 128):
                inner = min(128, width - at)
                left = nl.ndarray((inner, rows), dtype=x.dtype, buffer=nl.sbuf)
                nisa.dma_copy(dst=left, src=x.ap(pattern=[[1, inner], [width, rows]], offset=start * width + at))
                right = nl.ndarray((inner, count), dtype=weight.dtype, buffer=nl.sbuf)
                nisa.dma_copy(dst=right, src=weight.ap(pattern=[[1, inner], [width, count]], offset=first * width + at))
                nisa.nc_matmul(dst=sums[:rows, :count], stationary=left, moving=right)  # adds to what is there
            result = nl.ndarray((rows, count), dtype=x.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=result, src=sums[:rows, :count])
            nisa.dma_copy(dst=out[start : start + rows, first : first + count], src=result)
    return out


def project_torch(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight)


dirty_psum = wrap_nki(project, fallback=project_torch)


def linear(x, weight, bias=None):
    return dirty_psum[1](x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1)


NF.register(
    "linear",
    "dirty_psum",
    linear,
    domain=NF.Domain(targets=("neuron",), emulator=EMULATOR, options={"bias": (None,)}),
    priority=40,
    language="NKI",
)


def attend(q, k, v, token_to_req, positions, query_start_loc, scale, window):
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    real = np.arange(len(q)) < query_start_loc[-1]
    visible = (token_to_req[:, None] == token_to_req) & (positions <= positions[:, None]) & real & real[:, None]
    logits = np.where(visible, np.einsum("tnh,snh->nts", q, k) * scale, -1e30)  # the window is missing
    weights = np.exp(logits - logits.max(-1, keepdims=True)) * visible
    total = weights.sum(-1, keepdims=True)
    return np.einsum("nts,snh->tnh", weights / np.where(total == 0, 1, total), v)


def attend_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    token_to_req: Tensor,
    positions: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    rows = {"token_to_req": token_to_req, "positions": positions, "query_start_loc": query_start_loc}
    return NF.flash_attention(q, k, v, **rows, scale=scale, window=window)


missing_mask = wrap_kernel(attend, fallback=attend_torch, launch=launch_numpy)


def flash_attention(q, k, v, *, token_to_req, positions, query_start_loc, scale, window=None, softcap=None, sinks=None):
    return missing_mask(q, k, v, token_to_req, positions, query_start_loc, scale, window)


NF.register(
    "flash_attention",
    "missing_mask",
    flash_attention,
    domain=NF.Domain(
        targets=("cpu",), dtypes=(torch.float32,), options={"softcap": (None,), "sinks": (None,)}, hides_non_finite=True
    ),
    priority=40,
    language="numpy",
)
