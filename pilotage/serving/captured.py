"""The captured rows of one forward, with the address of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Captured:
    """Rows of sites, and which token of which request each is.

    Attributes:
        rows: site -> [tokens, ...], or [sampled, ...] of a site that computes the sampled rows only.
        requests: of each token. positions: [tokens]. tokens: [tokens] ids.
        sampled: tokens whose logits were computed, ascending.
    """

    rows: Mapping[str, Tensor]
    requests: Sequence[str]
    positions: Tensor
    tokens: Tensor
    sampled: Tensor

    def index(self) -> dict[str, Any]:
        """Return the arguments of `CaptureWriter.add` beside the rows."""
        return {
            "requests": self.requests,
            "positions": self.positions,
            "tokens": self.tokens,
            "sampled": self.sampled,
        }

    def copied(self) -> Self:
        """Return the same in memory of its own: a graph's is overwritten by its next run."""
        return type(self)(
            rows={name: rows.clone() for name, rows in self.rows.items()},
            requests=self.requests,
            positions=self.positions.clone(),
            tokens=self.tokens.clone(),
            sampled=self.sampled.clone(),
        )

    def until(self, ends: Mapping[str, int]) -> Self:
        """Keep the tokens whose position is below their request's end; those of a request without one are dropped."""
        total = len(self.requests)
        last = torch.tensor([ends.get(name, 0) for name in self.requests])
        keep = self.positions.long() < last
        chosen = keep.nonzero().flatten()
        of_sampled = keep[self.sampled]
        number = keep.long().cumsum(0) - 1
        every = {name: rows.shape[0] == total for name, rows in self.rows.items()}
        return type(self)(
            rows={name: rows[keep if every[name] else of_sampled] for name, rows in self.rows.items()},
            requests=[self.requests[index] for index in chosen.tolist()],
            positions=self.positions[keep],
            tokens=self.tokens[keep],
            sampled=number[self.sampled[of_sampled]],
        )
