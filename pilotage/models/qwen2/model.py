"""Qwen2 and Qwen2.5: the architecture.

Llama's decoder layer with biases on the query, key and value projections and, where the config asks for it, a sliding
window in some layers (Qwen2 report, arXiv:2407.10671; transformers modeling_qwen2.py).
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
from pilotage.models.qwen2.config import Qwen2Config
from pilotage.models.qwen2.weights import weight_map


class Qwen2Attention(GroupedQueryAttention):
    """Grouped-query attention with rotary positions; its query, key and value projections have biases."""

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], ctx: Any) -> Tensor:
        """Attend: x [..., D] -> [..., D]."""
        q, k, v = self.qkv(x)
        q, k = NF.rotary(q, k, *rope)
        return self.attend(q, k, v, ctx)


class Qwen2DecoderLayer(PreNormDecoderLayer):
    """Attention and MLP, each on the normalised stream and added back."""

    attention_class = Qwen2Attention


class Qwen2ForCausalLM(CausalLM):
    """The backbone of these layers, and the head."""

    config_class = Qwen2Config
    weight_map = staticmethod(weight_map)

    def __init__(
        self,
        config: Qwen2Config,
        backend: BackendConfig | None = None,
        layer_class: type[nn.Module] = Qwen2DecoderLayer,
    ) -> None:
        super().__init__(config, backend)
        self.model = DecoderBackbone(config, self.backend, layer_class)
        self.lm_head = initialize_lm_head_module(self.backend.linear, config.hidden_size, config.vocab_size)


__getattr__ = training_face(__name__)
