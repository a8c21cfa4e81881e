"""Linear layers that hold one rank's share and do their own communication."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import pilotage.functional as NF
from pilotage.nn.packing import unpack
from pilotage.parallel import enter, get_component, leave, per_rank
from pilotage.weights import (
    padded_sharding_weight_loader,
    set_weight_loader,
    sharding_weight_loader,
    with_rank_override,
)


class ColumnParallelLinear(nn.Module):
    """A linear layer whose output features are divided over the ranks.

    Args:
        in_features: D.
        out_features: of the whole layer.
        bias: whether there is one; divided like the output.
        num_shards: distinct shares; fewer than ranks when a share is held by several (key/value heads), then rank r
            holds share r // (ranks / num_shards). None: as many as ranks. 1: every rank holds everything.
        gather_output: give every rank the whole output.
        component: part of the model that it belongs to; see `parallel.layout`. Attention wants all rows, whatever its
            replicas do later: each of them caches the keys and values of every request.
        padded: out_features need not divide; the last shares are filled up with zeros.

    Raises:
        Unsupported: out_features does not divide over num_shards, or num_shards over the ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        num_shards: int | None = None,
        gather_output: bool = False,
        component: str = "attention",
        padded: bool = False,
    ) -> None:
        super().__init__()
        self.component = get_component(component)
        self.wants = None if component == "attention" else self.component
        self.group = self.component.tp
        self.in_features, self.out_features, self.gather_output = in_features, out_features, gather_output
        self.num_shards = num_shards or self.group.world_size
        replicas = per_rank(self.group.world_size, self.num_shards, "num_shards")
        rows = (
            -(-out_features // self.num_shards) if padded else per_rank(out_features, self.num_shards, "out_features")
        )
        self.weight = nn.Parameter(torch.empty(rows, in_features))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None
        if self.num_shards > 1:
            shares = padded_sharding_weight_loader if padded else sharding_weight_loader
            loader = with_rank_override(shares(0, rows, self.num_shards), self.group.rank // replicas)
            for parameter in (self.weight, self.bias):
                if parameter is not None:
                    set_weight_loader(parameter, loader)

    def forward(self, x: Tensor) -> Tensor:
        """Project x [..., D] -> [..., out_features / num_shards], or [..., out_features] with gather_output."""
        return self.gather(self.local(enter(x, self.wants)))

    def local(self, x: Tensor) -> Tensor:
        """Compute this rank's share of the output, without communication."""
        return NF.linear(x, self.weight, self.bias)

    def gather(self, share: Tensor) -> Tensor:
        """Make this rank's share of the output what `forward` promises."""
        return self.group.all_gather(share, dim=-1) if self.gather_output and self.num_shards > 1 else share

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("weight", "bias"):
            unpack(self)
        super().__setattr__(name, value)

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        unpack(self)  # fn may move the weights out of their common storage
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        unpack(self)  # assign=True replaces the parameters
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"in={self.in_features}, out={self.out_features}, bias={self.bias is not None}, shards={self.num_shards}"


class ReplicatedLinear(ColumnParallelLinear):
    """A linear layer that is whole on every rank and computes the rows that the rank has, without communication."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias, num_shards=1)

    def forward(self, x: Tensor) -> Tensor:
        """Project x [..., D] -> [..., out_features], the rows that came in."""
        return self.local(x)


class LMHead(ColumnParallelLinear):
    """The head: vocabulary divided over the ranks, filled up where it does not divide, logits whole on every rank.

    Attributes:
        screen: an 8-bit copy of the weight, on which a greedy step finds what it need not compute; None without one.
    """

    def __init__(self, in_features: int, vocab_size: int, bias: bool = False) -> None:
        super().__init__(in_features, vocab_size, bias, gather_output=True, component="lm_head", padded=True)
        self.screen: NF.Screen | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Project hidden rows x [rows, D] to logits [rows, V]."""
        replicas = self.component.dp
        shared = replicas.process_group is not None and x.ndim == 2 and x.shape[0] % replicas.world_size == 0
        if shared:
            count = x.shape[0] // replicas.world_size
            x = x.narrow(0, replicas.rank * count, count)
        with NF.screened(self.screen):
            logits = self.gather(NF.lm_head(x, self.weight, self.bias))
        if logits.shape[-1] > self.out_features:
            logits = logits[..., : self.out_features]
        return replicas.all_gather(logits, dim=0) if shared else logits


class RowParallelLinear(nn.Module):
    """A linear layer whose input features are divided over the ranks; its output is summed over them.

    Args:
        in_features: of the whole layer.
        out_features: D.
        bias: whether there is one; whole on every rank and added once, after the sum.
        component: part of the model that it belongs to; see `parallel.layout`.

    Raises:
        Unsupported: in_features does not divide over the ranks.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, *, component: str = "attention"
    ) -> None:
        super().__init__()
        self.component = get_component(component)
        self.group = self.component.tp
        self.in_features, self.out_features = in_features, out_features
        ranks = self.group.world_size
        columns = per_rank(in_features, ranks, "in_features")
        self.weight = nn.Parameter(torch.empty(out_features, columns))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        if ranks > 1:
            set_weight_loader(
                self.weight, with_rank_override(sharding_weight_loader(1, columns, ranks), self.group.rank)
            )

    @property
    def inner_bias(self) -> Tensor | None:
        """The bias where it can be part of the product: with one rank."""
        return self.bias if self.group.world_size == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Project this rank's features x [..., in_features / ranks] -> [..., D], summed."""
        return self.reduce(NF.o_proj(x, self.weight, self.inner_bias))

    def reduce(self, partial: Tensor) -> Tensor:
        """Sum the ranks' products [..., D], or this rank's rows where rows are divided; add what bias is left."""
        total = leave(partial, self.component)
        return total if self.bias is None or self.group.world_size == 1 else total + self.bias

    def extra_repr(self) -> str:
        return f"in={self.in_features}, out={self.out_features}, bias={self.bias is not None}"
