"""The router and the experts of a mixture-of-experts layer, as modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import pilotage.functional as NF
from pilotage.core.errors import ConfigError
from pilotage.parallel import divisors_text, enter, get_component, get_parallel_layout, leave, per_rank
from pilotage.weights import (
    LazySlice,
    SafetensorsWeightLoader,
    expert_parallel_tensor_dim_loader,
    keep_dtype,
    set_weight_loader,
    sharding_weight_loader,
    with_rank_override,
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
    """Gated MLPs, each rank holding a share of every expert's inner channels, or of some experts.

    With an `ep_degree` of n (see `parallel.ParallelLayout`) the experts are dealt out over n groups of neighbouring
    ranks, and the ranks of a group divide each of theirs.

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
        name: the block's, for errors.

    Raises:
        ConfigError: the experts do not divide over `ep_degree`.
        Unsupported: F does not divide over the ranks of a group.
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
        name: str = "experts",
    ) -> None:
        super().__init__()
        self.component = get_component("mlp")
        self.group = self.component.tp
        self.top_k, self.activation, self.interleaved, self.inputs_first = top_k, activation, interleaved, inputs_first
        self.alpha, self.limit = alpha, limit
        degree = get_parallel_layout().ep_degree if self.group.world_size > 1 else 1
        if num_experts % degree:
            raise ConfigError(
                f"{num_experts} experts do not divide over ep_degree={degree}",
                where=name,
                do=f"use {divisors_text(num_experts)}",
            )
        ranks = self.group.world_size // degree  # that divide one expert
        place, rank = divmod(self.group.rank, ranks)
        count = num_experts // degree
        self.num_experts, self.local_experts = num_experts, range(place * count, (place + 1) * count)
        # Every rank of a group has the whole of the down projection's bias, and their results are added up.
        self.adds_bias = rank == 0
        inner = per_rank(intermediate_size, ranks, "the experts' intermediate_size")
        gate_up, down = (2 * inner, hidden_size), (hidden_size, inner)
        if inputs_first:
            gate_up, down = gate_up[::-1], down[::-1]
        self.gate_up_proj = nn.Parameter(torch.empty(count, *gate_up))
        self.down_proj = nn.Parameter(torch.empty(count, *down))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(count, 2 * inner)) if bias else None
        self.down_proj_bias = nn.Parameter(torch.empty(count, hidden_size)) if bias else None
        if self.group.world_size == 1:
            return
        rows, columns = (2, 1) if inputs_first else (1, 2)
        whole = SafetensorsWeightLoader()
        shares = {
            self.gate_up_proj: _gate_up_loader(rows, inner, ranks, interleaved) if ranks > 1 else whole,
            self.down_proj: sharding_weight_loader(columns, inner, ranks) if ranks > 1 else whole,
        }
        if self.gate_up_proj_bias is not None and self.down_proj_bias is not None:
            shares[self.gate_up_proj_bias] = _gate_up_loader(1, inner, ranks, interleaved) if ranks > 1 else whole
            shares[self.down_proj_bias] = whole
        for parameter, loader in shares.items():
            loader = with_rank_override(loader, rank)
            if degree > 1:
                loader = expert_parallel_tensor_dim_loader(self.local_experts, loader, expert_dim=0)
            set_weight_loader(parameter, loader)

    def forward(self, x: Tensor, affinities: Tensor) -> Tensor:
        """Run the experts: x [..., D] and affinities [..., E] of the same rows -> [..., D], summed over the ranks."""
        gate_up: Tensor = self.gate_up_proj
        down: Tensor = self.down_proj
        if self.inputs_first:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        x, affinities = enter(x, self.component), enter(affinities, self.component)
        if len(self.local_experts) < self.num_experts:
            # Experts of other ranks have their part there; the sum over the ranks puts all together.
            affinities = affinities[..., self.local_experts.start : self.local_experts.stop]
        partial = NF.experts(
            x,
            affinities,
            gate_up,
            down,
            self.gate_up_proj_bias,
            self.down_proj_bias if self.adds_bias else None,
            top_k=min(self.top_k, len(self.local_experts)),
            activation=self.activation,
            interleaved=self.interleaved,
            alpha=self.alpha,
            limit=self.limit,
        )
        return leave(partial, self.component)

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
