"""gpt-oss: the training face."""

from __future__ import annotations

from transformers import GptOssConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from pilotage.models.common.hf import DecoderPreTrainedModel
from pilotage.models.common.hf_checkpointing_mixin import HFCheckpointingMixin
from pilotage.models.common.hf_heads import SparseForCausalLM
from pilotage.models.gpt_oss import model


class GptOssDecoderLayer(GradientCheckpointingLayer, model.GptOssDecoderLayer):
    """The decoder layer that is served, which may recompute its activations."""


class GptOssPreTrainedModel(DecoderPreTrainedModel):
    """What models with this backbone share."""

    config_class = GptOssConfig
    architecture = model.GptOssForCausalLM
    layer_class = GptOssDecoderLayer
    # sdpa has no sinks.
    _supports_sdpa = False


class GptOssForCausalLM(HFCheckpointingMixin, SparseForCausalLM, GptOssPreTrainedModel):
    """The backbone and the head."""


ModelClass = GptOssForCausalLM
