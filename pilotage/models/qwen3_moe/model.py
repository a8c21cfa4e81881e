"""Qwen3-MoE: the architecture.

Qwen3's attention; in most layers the feed-forward block is experts, of which each token takes the few that a softmax
over all of them ranks first (Qwen3 report, arXiv:2505.09388; transformers modeling_qwen3_moe.py).
"""

from __future__ import annotations

from torch import nn

from pilotage.models.common import (
    BackendConfig,
    CausalLM,
    DecoderBackbone,
    PreNormDecoderLayer,
    SparseMoE,
    initialize_lm_head_module,
)
from pilotage.models.common.face import training_face
from pilotage.models.qwen3.model import Qwen3Attention
from pilotage.models.qwen3_moe.config import Qwen3MoeConfig
from pilotage.models.qwen3_moe.weights import weight_map


class Qwen3MoeDecoderLayer(PreNormDecoderLayer):
    """Attention and experts (in some layers a dense MLP), each on the normalised stream and added back."""

    attention_class = Qwen3Attention

    def __init__(self, config: Qwen3MoeConfig, layer_idx: int, backend: BackendConfig) -> None:
        super().__init__(config, layer_idx, backend)
        if config.mlp_layer_types[layer_idx] == "sparse":
            self.mlp = SparseMoE(config, layer_idx)


class Qwen3MoeForCausalLM(CausalLM):
    """The backbone of these layers, and the head."""

    config_class = Qwen3MoeConfig
    weight_map = staticmethod(weight_map)

    def __init__(
        self,
        config: Qwen3MoeConfig,
        backend: BackendConfig | None = None,
        layer_class: type[nn.Module] = Qwen3MoeDecoderLayer,
    ) -> None:
        super().__init__(config, backend)
        self.model = DecoderBackbone(config, self.backend, layer_class)
        self.lm_head = initialize_lm_head_module(self.backend.linear, config.hidden_size, config.vocab_size)


__getattr__ = training_face(__name__)
