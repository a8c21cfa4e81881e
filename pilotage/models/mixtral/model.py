"""Mixtral: the architecture.

Mistral's attention with experts for its MLP, of which each token takes the two that a softmax over all of them ranks
first, their probabilities divided by their sum (arXiv:2401.04088; transformers modeling_mixtral.py).
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
from pilotage.models.llama3.model import LlamaAttention
from pilotage.models.mixtral.config import MixtralConfig
from pilotage.models.mixtral.weights import weight_map


class MixtralDecoderLayer(PreNormDecoderLayer):
    """Attention and experts, each on the normalised stream and added back."""

    attention_class = LlamaAttention

    def __init__(self, config: MixtralConfig, layer_idx: int, backend: BackendConfig) -> None:
        super().__init__(config, layer_idx, backend)
        self.mlp = SparseMoE(config, layer_idx)


class MixtralForCausalLM(CausalLM):
    """The backbone of these layers, and the head."""

    config_class = MixtralConfig
    weight_map = staticmethod(weight_map)

    def __init__(
        self,
        config: MixtralConfig,
        backend: BackendConfig | None = None,
        layer_class: type[nn.Module] = MixtralDecoderLayer,
    ) -> None:
        super().__init__(config, backend)
        self.model = DecoderBackbone(config, self.backend, layer_class)
        self.lm_head = initialize_lm_head_module(self.backend.linear, config.hidden_size, config.vocab_size)


__getattr__ = training_face(__name__)
