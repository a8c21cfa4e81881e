"""Which tokens' experts are beyond doubt, whatever the router's rule of choosing them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pilotage.accuracy import metrics

# Two experts are told apart where their logits differ by this many times the noise of the router's logits.
TIE = 4.0
# Disturbed copies of a router's input that are asked for their experts, and the size of what they change in the logits,
# such that of so many the largest difference of two logits is about `TIE` times the noise.
DRAWS, SHARE = 64, 0.3


@dataclass(frozen=True, kw_only=True)
class Routing:
    """What a router was asked, and what it said.

    Attributes:
        router: Hugging Face's module; its `weight` [E, D] makes the logits.
        x: [S, D], its input, as the module got it.
        logits: [S, E] in fp32.
        experts: [S, k], which it chose; None where it does not say.
    """

    router: Any
    x: Tensor
    logits: Tensor
    experts: Tensor | None

    @classmethod
    def seen(cls, router: Any, x: Tensor, output: Any) -> Routing:
        """Take up one call of a router."""
        bias = getattr(router, "bias", None)
        x = x.reshape(-1, x.shape[-1])
        logits = torch.nn.functional.linear(x.float(), router.weight.float(), None if bias is None else bias.float())
        return cls(router=router, x=x, logits=logits, experts=_indices(output, len(x)))

    def beyond_doubt(self, noisy: Tensor) -> Tensor:
        """Return [S] whether a token's experts are the same under the noise of the logits.

        A token that two experts want almost equally, or two groups of experts, goes to either by rounding alone, and
        its output is then another one. The router itself says so: it is asked again with inputs that differ a little,
        because every model has its own rule of groups, corrections and scores.

        Args:
            noisy: [S, E], the same logits in a control.
        """
        apart = (noisy - self.logits).abs().amax(-1)
        size = float(self.logits.square().mean().sqrt())
        unit = apart.clamp_min(float(apart.square().mean().sqrt())).clamp_min(metrics.LINF_FLOOR * size)
        if self.experts is None:
            top_k = int(self.router.top_k)
            if top_k >= self.logits.shape[-1]:
                return torch.ones(len(self.logits), dtype=torch.bool)
            best = self.logits.topk(top_k + 1).values
            return best[:, -2] - best[:, -1] > TIE * unit
        chosen = self.experts.sort(-1).values
        same = torch.ones(len(chosen), dtype=torch.bool)
        generator = torch.Generator().manual_seed(0)
        weight = self.router.weight.float()
        for _ in range(DRAWS):
            change = torch.randn(self.x.shape, generator=generator)
            moved = torch.nn.functional.linear(change, weight).square().mean(-1).sqrt().clamp_min(1e-30)
            asked = self.x.float() + change * (SHARE * TIE * unit / moved)[:, None]
            found = _indices(self.router(asked.to(self.x.dtype)), len(chosen))
            assert found is not None
            same &= (found.sort(-1).values == chosen).all(-1)
        return same


def _indices(output: Any, tokens: int) -> Tensor | None:
    """Return the experts [S, k] among what a router returns."""
    parts = output if isinstance(output, tuple | list) else (output,)
    for part in parts:
        if isinstance(part, Tensor) and not part.is_floating_point() and part.ndim == 2 and len(part) == tokens:
            return part
    return None
