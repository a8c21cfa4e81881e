"""An RMS norm for NeuronCores, wrapped, and offered as an implementation of the operator."""

import torch
from torch import Tensor

import pilotage.functional as NF
from pilotage.kernels import nki as interpreter  # before `import nki`: it takes the name where nobody else has it
from pilotage.utils.nki_utils import wrap_nki

interpreter.install()
import nki  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402


@nki.jit
def rms_rows(x, weight, eps):
    """x [T, D] over its rows' root mean square, times weight [D]; at most 128 rows at a time."""
    tokens, width = x.shape
    out = nl.ndarray((tokens, width), dtype=x.dtype, buffer=nl.shared_hbm)
    for start in range(0, tokens, 128):
        rows = min(128, tokens - start)
        tile = nl.ndarray((rows, width), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=x[start : start + rows, :])
        scale = nl.ndarray((rows, width), dtype=weight.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=scale, src=weight.ap(pattern=[[0, rows], [1, width]]))
        squares = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=squares, data1=tile, data2=tile, op=nl.multiply)
        size = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=size, op=nl.add, data=squares, axis=1)
        nisa.tensor_scalar(dst=size, data=size, op0=nl.multiply, operand0=1.0 / width, op1=nl.add, operand1=eps)
        nisa.tensor_scalar(dst=size, data=size, op0=nl.rsqrt, operand0=0.0)
        nisa.tensor_scalar(dst=squares, data=tile, op0=nl.multiply, operand0=size)
        result = nl.ndarray((rows, width), dtype=x.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=result, data1=squares, data2=scale, op=nl.multiply)
        nisa.dma_copy(dst=out[start : start + rows, :], src=result)
    return out


def rms_rows_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


my_rms_rows = wrap_nki(rms_rows, fallback=rms_rows_torch)


def rms_norm(x, weight, *, eps, unit_offset=False, round_once=False):
    return my_rms_rows[1](x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)


NF.register(
    "rms_norm",
    "mine",
    rms_norm,
    domain=NF.Domain(
        targets=("neuron",),
        dtypes=(torch.float32, torch.bfloat16),
        one_dtype=("x", "weight"),
        limits={"D": NF.Limit(at_most=4096, why="a row has to fit a partition of SBUF")},
        options={"unit_offset": (False,)},
        gradient=True,
        emulator=NF.Emulator(name="the NKI interpreter", how="NKI_SIMULATOR=1", active=interpreter.simulating),
    ),
    priority=50,
    language="NKI",
)
