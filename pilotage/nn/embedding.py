"""Token embedding with the vocabulary divided over the ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import pilotage.functional as NF
from pilotage.parallel import get_component, leave, own_rows
from pilotage.weights import padded_sharding_weight_loader, set_weight_loader, with_rank_override


class VocabDimShardedEmbedding(nn.Module):
    """An embedding of which each rank holds a contiguous range of token ids.

    Args:
        num_embeddings: V.
        embedding_dim: D.
        scale: factor on the rows, rounded to their dtype; None for none.

    Where V does not divide over the ranks the last shares are filled up with zeros.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, *, scale: float | None = None) -> None:
        super().__init__()
        self.component = get_component("embedding")
        self.group = self.component.tp
        self.num_embeddings, self.embedding_dim, self.scale = num_embeddings, embedding_dim, scale
        rows = -(-num_embeddings // self.group.world_size)
        self.first_id = rows * self.group.rank
        self.weight = nn.Parameter(torch.empty(rows, embedding_dim))
        if self.group.world_size > 1:
            loader = padded_sharding_weight_loader(0, rows, self.group.world_size)
            set_weight_loader(self.weight, with_rank_override(loader, self.group.rank))

    def forward(self, input_ids: Tensor) -> Tensor:
        """Look up input_ids [T] -> [T, D], the same on every rank, or this rank's rows where these are divided."""
        input_ids = own_rows(input_ids, self.component)
        if self.group.world_size == 1:
            return leave(NF.embedding(input_ids, self.weight, scale=self.scale), self.component)
        local_ids = input_ids - self.first_id
        mine = (local_ids >= 0) & (local_ids < self.weight.shape[0])
        rows = NF.embedding(torch.where(mine, local_ids, 0), self.weight, scale=self.scale)
        # One rank has the row and the others add zeros, so the sum is exact.
        return leave(torch.where(mine[..., None], rows, 0), self.component)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, scale={self.scale}"
