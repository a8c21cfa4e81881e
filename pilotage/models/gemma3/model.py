"""Gemma 3 (text): the architecture.

Sliding-window and full-attention layers in a pattern, each kind with its own RoPE base; an RMS norm over each query and
key head; a norm before and after both attention and MLP, all with weights stored minus one; embedded tokens scaled by
sqrt(D); a tanh-gelu gated MLP; the head tied to the embedding (Gemma 3 report, arXiv:2503.19786; transformers
modeling_gemma3.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

import pilotage.functional as NF
from pilotage.core.tap import tap
from pilotage.models.common import (
    BackendConfig,
    CausalLM,
    DecoderBackbone,
    GatedMLP,
    GroupedQueryAttention,
    initialize_lm_head_module,
    initialize_rms_norm_module,
)
from pilotage.models.common.face import training_face
from pilotage.models.gemma3.config import Gemma3Config
from pilotage.models.gemma3.weights import weight_map


class Gemma3Attention(GroupedQueryAttention):
    """Grouped-query attention; queries and keys are normalised per head, then rotated. Some layers have a window."""

    def __init__(self, config: Gemma3Config, layer_idx: int, backend: BackendConfig) -> None:
        super().__init__(config, layer_idx, backend)
        norm = partial(
            initialize_rms_norm_module, backend.rms_norm, config.head_size, eps=config.norm_eps, unit_offset=True
        )
        self.q_norm, self.k_norm = norm(), norm()

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], ctx: Any) -> Tensor:
        """Attend: x [..., D] -> [..., D]."""
        q, k, v = self.qkv(x)
        q, k = NF.rotary(self.q_norm(q), self.k_norm(k), *rope)
        return self.attend(q, k, v, ctx)


class Gemma3DecoderLayer(nn.Module):
    """Attention and MLP, each normalised before and after, and added back.

    Attributes:
        attention_class: called with (config, layer index, backend).
    """

    attention_class: type[GroupedQueryAttention] = Gemma3Attention

    def __init__(self, config: Gemma3Config, layer_idx: int, backend: BackendConfig) -> None:
        super().__init__()
        self.name = f"model.layers.{layer_idx}"
        self.self_attn = self.attention_class(config, layer_idx, backend)
        self.mlp = GatedMLP(config, backend)
        norm = partial(
            initialize_rms_norm_module, backend.rms_norm, config.hidden_size, eps=config.norm_eps, unit_offset=True
        )
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], ctx: Any) -> Tensor:
        """x [..., D] -> [..., D]."""
        attended = self.self_attn(self.input_layernorm(x), rope, ctx)
        x = tap(f"{self.name}.mid", x + self.post_attention_layernorm(attended))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma3ForCausalLM(CausalLM):
    """The backbone of these layers, and the head."""

    config_class = Gemma3Config
    weight_map = staticmethod(weight_map)

    def __init__(
        self,
        config: Gemma3Config,
        backend: BackendConfig | None = None,
        layer_class: type[nn.Module] = Gemma3DecoderLayer,
    ) -> None:
        super().__init__(config, backend)
        self.model = DecoderBackbone(
            config, self.backend, layer_class, embedding_scale=config.embedding_scale, unit_offset=True
        )
        self.lm_head = initialize_lm_head_module(self.backend.linear, config.hidden_size, config.vocab_size)


__getattr__ = training_face(__name__)
