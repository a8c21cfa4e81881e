"""The weight map of models that combine projections which checkpoints hold separately."""

from __future__ import annotations

from pilotage.models.common.config import DecoderConfig
from pilotage.weights import Fuse, WeightMap

_ATTENTION, _MLP = "model.layers.{i}.self_attn", "model.layers.{i}.mlp"


def combined(weight_map: WeightMap, config: DecoderConfig) -> WeightMap:
    """Add to a map of separate projections how `BackendConfig.combined` puts them together.

    `qkv_proj` has the rows of q, then of k, then of v, each with its heads in order; `gate_up_proj` those of gate, then
    of up. Biases follow their rows.
    """
    width, kv_width = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    attention = ["weight", "bias"] if config.attention_bias else ["weight"]
    mlp = ["weight", "bias"] if config.mlp_bias else ["weight"]
    qkv = [
        Fuse(
            (f"{_ATTENTION}.q_proj.{kind}", f"{_ATTENTION}.k_proj.{kind}", f"{_ATTENTION}.v_proj.{kind}"),
            f"{_ATTENTION}.qkv_proj.{kind}",
            (width, kv_width, kv_width),
        )
        for kind in attention
    ]
    gate_up = [
        Fuse(
            (f"{_MLP}.gate_proj.{kind}", f"{_MLP}.up_proj.{kind}"),
            f"{_MLP}.gate_up_proj.{kind}",
            (config.intermediate_size, config.intermediate_size),
        )
        for kind in mlp
    ]
    return WeightMap([*weight_map.ties, *weight_map.drops, *qkv, *gate_up, *weight_map.rules])
