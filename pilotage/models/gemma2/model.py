"""Gemma 2: the architecture.

Sliding-window and full attention in turn, the scores bounded by a tanh; a norm before and after both attention and MLP,
all with weights stored minus one; embedded tokens scaled by sqrt(D); a tanh-gelu gated MLP; the head tied to the
embedding, and its logits bounded by a tanh (Gemma 2 report, arXiv:2408.00118; transformers modeling_gemma2.py).
"""

from __future__ import annotations

from torch import nn

from pilotage.models.common import (
    BackendConfig,
    CausalLM,
    DecoderBackbone,
    initialize_lm_head_module,
)
from pilotage.models.common.face import training_face
from pilotage.models.gemma2.config import Gemma2Config
from pilotage.models.gemma2.weights import weight_map
from pilotage.models.gemma3.model import Gemma3DecoderLayer
from pilotage.models.llama3.model import LlamaAttention


class Gemma2Attention(LlamaAttention):
    """Grouped-query attention with bounded scores. Every other layer has a window."""

    def __init__(self, config: Gemma2Config, layer_idx: int, backend: BackendConfig) -> None:
        super().__init__(config, layer_idx, backend)
        self.softcap = config.attn_softcap


class Gemma2DecoderLayer(Gemma3DecoderLayer):
    """Attention and MLP, each normalised before and after, and added back."""

    attention_class = Gemma2Attention


class Gemma2ForCausalLM(CausalLM):
    """The backbone of these layers, and the head."""

    config_class = Gemma2Config
    weight_map = staticmethod(weight_map)

    def __init__(
        self,
        config: Gemma2Config,
        backend: BackendConfig | None = None,
        layer_class: type[nn.Module] = Gemma2DecoderLayer,
    ) -> None:
        super().__init__(config, backend)
        self.model = DecoderBackbone(
            config, self.backend, layer_class, embedding_scale=config.embedding_scale, unit_offset=True
        )
        self.lm_head = initialize_lm_head_module(self.backend.linear, config.hidden_size, config.vocab_size)


__getattr__ = training_face(__name__)
