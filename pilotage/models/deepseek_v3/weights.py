"""Checkpoint names to parameters: experts are stacked, and the layers that predict further tokens are left out."""

from __future__ import annotations

from pilotage.models.common.naming import same_names
from pilotage.models.deepseek_v3.config import DeepseekV3Config
from pilotage.weights import Drop, Stack, WeightMap

_EXPERT, _EXPERTS = "model.layers.{i}.mlp.experts.{e}", "model.layers.{i}.mlp.experts"
# Linear layers that 8-bit checkpoints hold with scales beside those that every decoder has.
_LINEARS = (
    *(f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")),
    *(f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")),
)


def weight_map(config: DeepseekV3Config) -> WeightMap:
    """The WeightMap of a DeepSeek-V3 checkpoint."""
    count, inner = config.num_experts, config.moe_intermediate_size
    stack = config.fp8.stack if config.fp8 is not None else Stack
    gate_up = (f"{_EXPERT}.gate_proj.weight", f"{_EXPERT}.up_proj.weight")
    after = range(config.num_layers, config.num_layers + config.num_mtp_layers)
    return same_names(
        *(config.fp8.rules(_LINEARS) if config.fp8 is not None else ()),
        *(Drop(f"model.layers.{i}.{{*rest}}", "predicts a further token; not served", first=True) for i in after),
        stack(gate_up, f"{_EXPERTS}.gate_up_proj", count, (inner, inner)),
        stack((f"{_EXPERT}.down_proj.weight",), f"{_EXPERTS}.down_proj", count, (config.hidden_size,)),
        tied=config.tie_word_embeddings,
        fp8=config.fp8,
    )
