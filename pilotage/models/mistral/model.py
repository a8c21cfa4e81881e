"""Mistral: the architecture.

Llama's decoder layer; every layer's attention sees a sliding window of keys where the config gives one
(arXiv:2310.06825; transformers modeling_mistral.py).
"""

from __future__ import annotations

from torch import nn

from pilotage.models.common import BackendConfig, CausalLM, DecoderBackbone, initialize_lm_head_module
from pilotage.models.common.face import training_face
from pilotage.models.llama3.model import LlamaDecoderLayer
from pilotage.models.mistral.config import MistralConfig
from pilotage.models.mistral.weights import weight_map


class MistralForCausalLM(CausalLM):
    """The backbone of these layers, and the head."""

    config_class = MistralConfig
    weight_map = staticmethod(weight_map)

    def __init__(
        self,
        config: MistralConfig,
        backend: BackendConfig | None = None,
        layer_class: type[nn.Module] = LlamaDecoderLayer,
    ) -> None:
        super().__init__(config, backend)
        self.model = DecoderBackbone(config, self.backend, layer_class)
        self.lm_head = initialize_lm_head_module(self.backend.linear, config.hidden_size, config.vocab_size)


__getattr__ = training_face(__name__)
