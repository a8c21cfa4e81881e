"""Linear layers that hold one rank's share and do their own communication."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import pilotage.functional as NF
from pilotage.nn.packing import unpack
from pilotage.parallel import enter, get_tp_group, leave, per_rank
from pilotage.weights import set_weight_loader, sharding_weight_loader, with_rank_override


class ColumnParallelLinear(nn.Module):
    """A linear layer whose output features are divided over the ranks.

    Args:
        in_features: D.
        out_features: of the whole layer.
        bias: whether there is one; divided like the output.
        num_shards: distinct shares; fewer than ranks when a share is held by several (key/value heads), then rank r
            holds share r // (ranks / num_shards). None: as many as ranks. 1: every rank holds everything.
        gather_output: give every rank the whole output.

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
    ) -> None:
        super().__init__()
        self.group = get_tp_group()
        self.in_features, self.out_features, self.gather_output = in_features, out_features, gather_output
        self.num_shards = num_shards or self.group.world_size
        replicas = per_rank(self.group.world_size, self.num_shards, "num_shards")
        rows = per_rank(out_features, self.num_shards, "out_features")
        self.weight = nn.Parameter(torch.empty(rows, in_features))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None
        if self.num_shards > 1:
            loader = with_rank_override(
                sharding_weight_loader(
                    shard_dim=0, shard_size=rows, num_shards=self.num_shards, is_storage_transposed=False
                ),
                self.group.rank // replicas,
            )
            for parameter in (self.weight, self.bias):
                if parameter is not None:
                    set_weight_loader(parameter, loader)

    def forward(self, x: Tensor) -> Tensor:
        """Project x [..., D] -> [..., out_features / num_shards], or [..., out_features] with gather_output."""
        return self.gather(self.local(enter(x)))

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
    """The head: vocabulary divided over the ranks, logits whole on every rank."""

    def __init__(self, in_features: int, vocab_size: int, bias: bool = False) -> None:
        super().__init__(in_features, vocab_size, bias, gather_output=True)

    def forward(self, x: Tensor) -> Tensor:
        """Project hidden rows x [rows, D] to logits [rows, V]."""
        return self.gather(NF.lm_head(x, self.weight, self.bias))


class RowParallelLinear(nn.Module):
    """A linear layer whose input features are divided over the ranks; its output is summed over them.

    Args:
        in_features: of the whole layer.
        out_features: D.
        bias: whether there is one; whole on every rank and added once, after the sum.

    Raises:
        Unsupported: in_features does not divide over the ranks.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.group = get_tp_group()
        self.in_features, self.out_features = in_features, out_features
        ranks = self.group.world_size
        columns = per_rank(in_features, ranks, "in_features")
        self.weight = nn.Parameter(torch.empty(out_features, columns))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        if ranks > 1:
            loader = sharding_weight_loader(
                shard_dim=1, shard_size=columns, num_shards=ranks, is_storage_transposed=False
            )
            set_weight_loader(self.weight, loader)

    @property
    def inner_bias(self) -> Tensor | None:
        """The bias where it can be part of the product: with one rank."""
        return self.bias if self.group.world_size == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Project this rank's features x [..., in_features / ranks] -> [..., D], summed."""
        return self.reduce(NF.o_proj(x, self.weight, self.inner_bias))

    def reduce(self, partial: Tensor) -> Tensor:
        """Sum the ranks' products [..., D], or this rank's rows where rows are divided; add what bias is left."""
        if self.group.world_size == 1:
            return partial
        total = leave(partial)
        return total if self.bias is None else total + self.bias

    def extra_repr(self) -> str:
        return f"in={self.in_features}, out={self.out_features}, bias={self.bias is not None}"
