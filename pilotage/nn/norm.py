"""RMS norm as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import pilotage.functional as NF


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension.

    Args:
        size: D, or H for query and key norms.
        eps: added to the mean square.
        unit_offset: the weight is stored minus one (Gemma).
        round_once: round after the weight, not before it (gpt-oss).
    """

    def __init__(self, size: int, *, eps: float, unit_offset: bool = False, round_once: bool = False) -> None:
        super().__init__()
        self.eps, self.unit_offset, self.round_once = eps, unit_offset, round_once
        self.weight = nn.Parameter(torch.zeros(size) if unit_offset else torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., D]; see `NF.rms_norm` for the numerics."""
        return NF.rms_norm(x, self.weight, eps=self.eps, unit_offset=self.unit_offset, round_once=self.round_once)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}, unit_offset={self.unit_offset}"
