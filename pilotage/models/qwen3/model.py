"""Qwen3: the architecture.

Llama's decoder layer with an RMS norm over each query and key head before rotation, and no biases unless the config
states them (Qwen3 report, arXiv:2505.09388; transformers modeling_qwen3.py).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

import pilotage.functional as NF
from pilotage.models.common import (
    BackendConfig,
    CausalLM,
    DecoderBackbone,
    GroupedQueryAttention,
    PreNormDecoderLayer,
    initialize_lm_head_module,
    initialize_rms_norm_module,
)
from pilotage.models.common.face import training_face
from pilotage.models.qwen3.config import Qwen3Config
from pilotage.models.qwen3.weights import weight_map


class Qwen3Attention(GroupedQueryAttention):
    """Grouped-query attention; queries and keys are normalised per head, then rotated."""

    def __init__(self, config: Qwen3Config, layer_idx: int, backend: BackendConfig) -> None:
        super().__init__(config, layer_idx, backend)
        self.q_norm = initialize_rms_norm_module(backend.rms_norm, config.head_size, eps=config.norm_eps)
        self.k_norm = initialize_rms_norm_module(backend.rms_norm, config.head_size, eps=config.norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], ctx: Any) -> Tensor:
        """Attend: x [..., D] -> [..., D]."""
        q, k, v = self.qkv(x)
        q, k = NF.rotary(self.q_norm(q), self.k_norm(k), *rope)
        return self.attend(q, k, v, ctx)


class Qwen3DecoderLayer(PreNormDecoderLayer):
    """Attention and MLP, each on the normalised stream and added back."""

    attention_class = Qwen3Attention


class Qwen3ForCausalLM(CausalLM):
    """The backbone of these layers, and the head."""

    config_class = Qwen3Config
    weight_map = staticmethod(weight_map)
    supports_eagle3 = True

    def __init__(
        self,
        config: Qwen3Config,
        backend: BackendConfig | None = None,
        layer_class: type[nn.Module] = Qwen3DecoderLayer,
    ) -> None:
        super().__init__(config, backend)
        self.model = DecoderBackbone(config, self.backend, layer_class)
        self.lm_head = initialize_lm_head_module(self.backend.linear, config.hidden_size, config.vocab_size)


__getattr__ = training_face(__name__)
