"""The router and the experts of a mixture-of-experts layer, as modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import pilotage.functional as NF
from pilotage.parallel import enter, get_tp_group, leave, per_rank
from pilotage.weights import (
    LazySlice,
    SafetensorsWeightLoader,
    keep_dtype,
    set_weight_loader,
    sharding_weight_loader,
)


class Router(nn.Module):
    """Scores of the experts; whole on every rank, and computed for the rows that a rank has.

    Args:
        hidden_size: D.
        num_experts: E.
        bias: whether there is one.
        fp32: compute the logits in fp32, whatever the dtype of the rows and the weight (DeepSeek-V3).
        correction: hold `e_score_correction_bias` [E], fp32, for the choice of experts.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, bias: bool = False, *, fp32: bool = False, correction: bool = False
    ) -> None:
        super().__init__()
        self.fp32 = fp32
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.bias = nn.Parameter(torch.empty(num_experts)) if bias else None
        if correction:
            self.e_score_correction_bias = nn.Parameter(torch.empty(num_experts, dtype=torch.float32))
            # Scores differ by less than half precision resolves.
            keep_dtype(self.e_score_correction_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Score x [..., D] -> logits [..., E]."""
        if self.fp32:
            bias = None if self.bias is None else self.bias.float()
            return NF.router_logits(x.float(), self.weight.float(), bias)
        return NF.router_logits(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, bias={self.bias is not None}"


class Experts(nn.Module):
    """Gated MLPs, each rank holding a share of every expert's inner channels.

    Args:
        num_experts: E.
        hidden_size: D.
        intermediate_size: F of one expert.
        top_k: experts of a token.
        activation: see `NF.experts`.
        bias: gate, up and down have one.
        interleaved: rows of gate and up alternate; otherwise gate's come first.
        inputs_first: weights are stored [E, in, out] (gpt-oss), not [E, out, in].
        alpha, limit: see `NF.experts`.

    Raises:
        Unsupported: F does not divide over the ranks.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        top_k: int,
        activation: str,
        bias: bool = False,
        interleaved: bool = False,
        inputs_first: bool = False,
        alpha: float | None = None,
        limit: float | None = None,
    ) -> None:
        super().__init__()
        self.group = get_tp_group()
        self.top_k, self.activation, self.interleaved, self.inputs_first = top_k, activation, interleaved, inputs_first
        self.alpha, self.limit = alpha, limit
        ranks = self.group.world_size
        inner = per_rank(intermediate_size, ranks, "the experts' intermediate_size")
        gate_up, down = (2 * inner, hidden_size), (hidden_size, inner)
        if inputs_first:
            gate_up, down = gate_up[::-1], down[::-1]
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, *gate_up))
        self.down_proj = nn.Parameter(torch.empty(num_experts, *down))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(num_experts, 2 * inner)) if bias else None
        self.down_proj_bias = nn.Parameter(torch.empty(num_experts, hidden_size)) if bias else None
        if ranks > 1:
            rows, columns = (2, 1) if inputs_first else (1, 2)
            set_weight_loader(self.gate_up_proj, _gate_up_loader(rows, inner, ranks, interleaved))
            set_weight_loader(self.down_proj, sharding_weight_loader(columns, inner, ranks))
            if self.gate_up_proj_bias is not None:
                set_weight_loader(self.gate_up_proj_bias, _gate_up_loader(1, inner, ranks, interleaved))

    def forward(self, x: Tensor, affinities: Tensor) -> Tensor:
        """Run the experts: x [..., D] and affinities [..., E] of the same rows -> [..., D], summed over the ranks."""
        gate_up: Tensor = self.gate_up_proj
        down: Tensor = self.down_proj
        if self.inputs_first:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        partial = NF.experts(
            enter(x),
            enter(affinities),
            gate_up,
            down,
            self.gate_up_proj_bias,
            # Every rank has the whole of it, and the ranks' results are added up.
            self.down_proj_bias if self.group.rank == 0 else None,
            top_k=self.top_k,
            activation=self.activation,
            interleaved=self.interleaved,
            alpha=self.alpha,
            limit=self.limit,
        )
        return leave(partial)

    def extra_repr(self) -> str:
        return f"{tuple(self.gate_up_proj.shape)}, top_k={self.top_k}, {self.activation}"


def _gate_up_loader(dim: int, inner: int, ranks: int, interleaved: bool) -> SafetensorsWeightLoader:
    """Return a loader of one rank's share of gate and of up, which follow one another, or alternate, along `dim`."""
    if interleaved:
        return sharding_weight_loader(dim, 2 * inner, ranks)

    def transform(slices: Sequence[LazySlice], rank: int) -> Tensor:
        gate, up = slices[0][:].chunk(2, dim=dim)
        return torch.cat([half.narrow(dim, rank * inner, inner) for half in (gate, up)], dim=dim)

    return SafetensorsWeightLoader(transform=transform)
