"""gpt-oss: the architecture.

Sliding-window and full attention in turn, every projection with a bias, and a learned sink in each head's softmax;
experts with biases and a clamped SwiGLU, of which each token takes the few largest router logits and a softmax over
these (gpt-oss model card, arXiv:2508.10925; transformers modeling_gpt_oss.py).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

import pilotage.functional as NF
from pilotage.core.tap import tap
from pilotage.models.common import (
    BackendConfig,
    CausalLM,
    DecoderBackbone,
    PreNormDecoderLayer,
    initialize_lm_head_module,
    initialize_rms_norm_module,
)
from pilotage.models.common.face import training_face
from pilotage.models.gpt_oss.config import GptOssConfig
from pilotage.models.gpt_oss.weights import weight_map
from pilotage.models.llama3.model import LlamaAttention
from pilotage.nn import Experts, Router
from pilotage.weights import set_weight_loader, sharding_weight_loader, with_rank_override


class GptOssAttention(LlamaAttention):
    """Grouped-query attention with a sink per query head. Every other layer has a window."""

    def __init__(self, config: GptOssConfig, layer_idx: int, backend: BackendConfig) -> None:
        super().__init__(config, layer_idx, backend)
        self.sinks = nn.Parameter(torch.empty(self.num_heads))
        group = self.component.tp
        if group.world_size > 1:
            loader = sharding_weight_loader(0, self.num_heads, group.world_size)
            set_weight_loader(self.sinks, with_rank_override(loader, group.rank))


class GptOssMLP(nn.Module):
    """Experts behind a router that keeps the largest logits and takes the softmax over these alone."""

    def __init__(self, config: GptOssConfig, layer_idx: int) -> None:
        super().__init__()
        self.name = f"model.layers.{layer_idx}.mlp"
        self.top_k = config.num_experts_per_token
        self.router = Router(config.hidden_size, config.num_experts, bias=True)
        self.experts = Experts(
            config.num_experts,
            config.hidden_size,
            config.moe_intermediate_size,
            top_k=self.top_k,
            activation="clamped_swiglu",
            bias=True,
            interleaved=True,
            inputs_first=True,
            alpha=config.swiglu_alpha,
            limit=config.swiglu_limit,
            name=self.name,
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        logits = tap(f"{self.name}.router", self.router(x))
        affinities = NF.expert_affinities(logits, top_k=self.top_k, rule="topk_softmax")
        return tap(f"{self.name}.experts", self.experts(x, affinities))


class GptOssDecoderLayer(PreNormDecoderLayer):
    """Attention and experts, each on the normalised stream and added back; norms round once."""

    attention_class = GptOssAttention

    def __init__(self, config: GptOssConfig, layer_idx: int, backend: BackendConfig) -> None:
        super().__init__(config, layer_idx, backend)
        self.mlp = GptOssMLP(config, layer_idx)
        norm = partial(
            initialize_rms_norm_module, backend.rms_norm, config.hidden_size, eps=config.norm_eps, round_once=True
        )
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()


class GptOssForCausalLM(CausalLM):
    """The backbone of these layers, and the head."""

    config_class = GptOssConfig
    weight_map = staticmethod(weight_map)

    def __init__(
        self,
        config: GptOssConfig,
        backend: BackendConfig | None = None,
        layer_class: type[nn.Module] = GptOssDecoderLayer,
    ) -> None:
        super().__init__(config, backend)
        self.model = DecoderBackbone(config, self.backend, layer_class)
        self.model.norm = initialize_rms_norm_module(
            self.backend.rms_norm, config.hidden_size, eps=config.norm_eps, round_once=True
        )
        self.lm_head = initialize_lm_head_module(self.backend.linear, config.hidden_size, config.vocab_size)


__getattr__ = training_face(__name__)
