"""Llama 3: the architecture.

Pre-norm decoder with grouped-query attention, rotary positions and a SwiGLU MLP (Llama 3 herd, arXiv:2407.21783;
transformers modeling_llama.py). Module names and weight layouts are Hugging Face's.
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
)
from pilotage.models.common.face import training_face
from pilotage.models.llama3.config import Llama3Config
from pilotage.models.llama3.weights import weight_map


class LlamaAttention(GroupedQueryAttention):
    """Grouped-query attention with rotary positions."""

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], ctx: Any) -> Tensor:
        """Attend: x [..., D] -> [..., D]."""
        q, k, v = self.qkv(x)
        q, k = NF.rotary(q, k, *rope)
        return self.attend(q, k, v, ctx)


class LlamaDecoderLayer(PreNormDecoderLayer):
    """Attention and MLP, each on the normalised stream and added back."""

    attention_class = LlamaAttention


class LlamaForCausalLM(CausalLM):
    """The backbone of these layers, and the head."""

    config_class = Llama3Config
    weight_map = staticmethod(weight_map)
    supports_eagle3 = True

    def __init__(
        self,
        config: Llama3Config,
        backend: BackendConfig | None = None,
        layer_class: type[nn.Module] = LlamaDecoderLayer,
    ) -> None:
        super().__init__(config, backend)
        self.model = DecoderBackbone(config, self.backend, layer_class)
        self.lm_head = initialize_lm_head_module(self.backend.linear, config.hidden_size, config.vocab_size)


__getattr__ = training_face(__name__)
