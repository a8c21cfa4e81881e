"""The values of a DeepSeek-V3 config that the model uses."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

from pilotage.models.common.config import MoEConfig
from pilotage.models.common.reading import read, refusal

_BEYOND = ("attention_bias", "attention_output_bias", "num_experts", "kv_lora_rank", "rope_interleave")


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(MoEConfig):
    """A DeepSeek-V3 config. `head_size` is that of the rotated channels; a query has `qk_nope_head_dim` more.

    Attributes:
        q_lora_rank: width of the queries' latent, None for queries projected at once.
        kv_lora_rank: width of the latent that keys and values are made from, and that is cached.
        qk_nope_head_dim, qk_rope_head_dim: channels of a query and key without and with rotation.
        v_head_dim: channels of a value.
        rope_interleave: neighbouring channels form the rotated pairs.
        num_shared_experts: experts that every token goes to, stored as one MLP.
        routed_scaling: factor on the routing weights.
        num_expert_groups, num_expert_groups_per_token: groups of experts, and how many of them a token may choose from.
        num_mtp_layers: layers after the decoder's that predict further tokens; their weights are left out.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool
    num_shared_experts: int
    routed_scaling: float
    num_expert_groups: int
    num_expert_groups_per_token: int
    num_mtp_layers: int

    @classmethod
    def from_configs(cls, hf_config: Any, neuron_config: Any = None) -> Self:
        """Read a Hugging Face config.

        Args:
            hf_config: a `DeepseekV3Config` of transformers, or the parsed config.json.
            neuron_config: the target's settings; none of them changes this model.

        Raises:
            Unsupported: a value that the model does not implement, named by its key.
        """
        spec = read(hf_config, beyond=_BEYOND)
        experts, groups, chosen = spec.num_experts, spec.num_expert_groups, spec.num_expert_groups_per_token
        if not groups or experts % groups or experts // groups < 2:
            raise refusal(
                spec, "num_expert_groups", f"{groups} groups do not divide {experts} experts into two or more"
            )
        if not chosen or chosen > groups or chosen * (experts // groups) < spec.num_experts_per_token:
            raise refusal(
                spec,
                "num_expert_groups_per_token",
                f"{chosen} of {groups} groups do not hold the {spec.num_experts_per_token} experts of a token",
            )
        # The frequencies are those of the rotated channels, not of the whole head.
        fields = dict(spec.fields)
        fields["head_size"] = dataclasses.replace(fields["head_size"], value=spec.qk_rope_head_dim)
        return cls.from_moe_spec(
            dataclasses.replace(spec, fields=fields),
            q_lora_rank=spec.q_lora_rank,
            kv_lora_rank=spec.kv_lora_rank,
            qk_nope_head_dim=spec.qk_nope_head_dim,
            qk_rope_head_dim=spec.qk_rope_head_dim,
            v_head_dim=spec.v_head_dim,
            rope_interleave=bool(spec.rope_interleave),
            num_shared_experts=spec.num_shared_experts,
            routed_scaling=spec.routed_scaling,
            num_expert_groups=groups,
            num_expert_groups_per_token=chosen,
            num_mtp_layers=spec.num_mtp_layers,
        )
