"""The sparse feed-forward block that Mixtral and Qwen MoE models share."""

from __future__ import annotations

from torch import Tensor, nn

import pilotage.functional as NF
from pilotage.core.tap import tap
from pilotage.models.common.config import MoEConfig
from pilotage.nn import Experts, Router


class SparseMoE(nn.Module):
    """Experts behind a router that takes the softmax over all of them and keeps the largest.

    Args:
        config: sizes and the routing rule.
        layer_idx: its layer; the address of its taps.
    """

    def __init__(self, config: MoEConfig, layer_idx: int) -> None:
        super().__init__()
        self.name = f"model.layers.{layer_idx}.mlp"
        self.top_k, self.renormalize = config.num_experts_per_token, config.norm_topk_prob
        self.gate = Router(config.hidden_size, config.num_experts)
        self.experts = Experts(
            config.num_experts,
            config.hidden_size,
            config.moe_intermediate_size,
            top_k=self.top_k,
            activation=config.activation,
            name=self.name,
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        logits = tap(f"{self.name}.router", self.gate(x))
        affinities = NF.expert_affinities(logits, top_k=self.top_k, rule="softmax_topk", renormalize=self.renormalize)
        return tap(f"{self.name}.experts", self.experts(x, affinities))
