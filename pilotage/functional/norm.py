"""RMS normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from pilotage.functional.registry import operator


@operator
def rms_norm(x: Tensor, weight: Tensor, *, eps: float, unit_offset: bool = False, round_once: bool = False) -> Tensor:
    """Scale each row to unit root mean square, then by the weight.

    Args:
        x: [..., D], any float dtype.
        weight: [D].
        eps: added to the mean square.
        unit_offset: multiply by (1 + weight), as Gemma stores it, instead of weight.
        round_once: apply the weight in fp32 too; Gemma's form always does.

    Returns:
        [..., D] in x's dtype.

    Numerics: the row is normalised in fp32. Llama's form rounds to x's dtype before the weight is applied; Gemma's
    applies (1 + weight) in fp32 and rounds once, and so does gpt-oss's with its plain weight (transformers
    modeling_llama.py, modeling_gemma3.py, modeling_gpt_oss.py).
    """
    x_fp32 = x.float()
    normed = x_fp32 * torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1.0 + weight.float())).to(x.dtype)
    if round_once:
        return (weight.float() * normed).to(x.dtype)
    return weight * normed.to(x.dtype)
