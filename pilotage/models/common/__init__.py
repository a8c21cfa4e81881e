"""What model packages share: backends, the attention context, the cache spec, reading configs, the serving face."""

from pilotage.models.common.backend import (
    BackendConfig,
    initialize_embedding_module,
    initialize_linear_module,
    initialize_lm_head_module,
    initialize_rms_norm_module,
)
from pilotage.models.common.blocks import DecoderBackbone, GatedMLP, GroupedQueryAttention, PreNormDecoderLayer
from pilotage.models.common.causal_lm import CausalLM
from pilotage.models.common.config import DecoderConfig, MoEConfig
from pilotage.models.common.context import PagedContext
from pilotage.models.common.kv import KVSpec, LayerSpec
from pilotage.models.common.moe import SparseMoE

__all__ = [
    "BackendConfig",
    "CausalLM",
    "DecoderBackbone",
    "DecoderConfig",
    "GatedMLP",
    "GroupedQueryAttention",
    "KVSpec",
    "LayerSpec",
    "MoEConfig",
    "PagedContext",
    "PreNormDecoderLayer",
    "SparseMoE",
    "initialize_embedding_module",
    "initialize_linear_module",
    "initialize_lm_head_module",
    "initialize_rms_norm_module",
]
