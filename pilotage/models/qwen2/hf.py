"""Qwen2 and Qwen2.5: the training face."""

from __future__ import annotations

from transformers import Qwen2Config
from transformers.modeling_layers import GradientCheckpointingLayer

from pilotage.models.common.hf import DecoderPreTrainedModel
from pilotage.models.common.hf_checkpointing_mixin import HFCheckpointingMixin
from pilotage.models.common.hf_heads import DecoderForCausalLM, DecoderForSequenceClassification
from pilotage.models.qwen2 import model


class Qwen2DecoderLayer(GradientCheckpointingLayer, model.Qwen2DecoderLayer):
    """The decoder layer that is served, which may recompute its activations."""


class Qwen2PreTrainedModel(DecoderPreTrainedModel):
    """What models with this backbone share."""

    config_class = Qwen2Config
    architecture = model.Qwen2ForCausalLM
    layer_class = Qwen2DecoderLayer


class Qwen2ForCausalLM(HFCheckpointingMixin, DecoderForCausalLM, Qwen2PreTrainedModel):
    """The backbone and the head."""


class Qwen2ForSequenceClassification(HFCheckpointingMixin, DecoderForSequenceClassification, Qwen2PreTrainedModel):
    """The backbone and a score of the last token."""


ModelClass = Qwen2ForCausalLM
