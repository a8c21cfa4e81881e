"""Llama 3: the training face."""

from __future__ import annotations

from transformers import LlamaConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from pilotage.models.common.hf import DecoderPreTrainedModel
from pilotage.models.common.hf_checkpointing_mixin import HFCheckpointingMixin
from pilotage.models.common.hf_heads import DecoderForCausalLM, DecoderForSequenceClassification
from pilotage.models.llama3 import model


class LlamaDecoderLayer(GradientCheckpointingLayer, model.LlamaDecoderLayer):
    """The decoder layer that is served, which may recompute its activations."""


class LlamaPreTrainedModel(DecoderPreTrainedModel):
    """What models with this backbone share."""

    config_class = LlamaConfig
    architecture = model.LlamaForCausalLM
    layer_class = LlamaDecoderLayer


class LlamaForCausalLM(HFCheckpointingMixin, DecoderForCausalLM, LlamaPreTrainedModel):
    """The backbone and the head."""


class LlamaForSequenceClassification(HFCheckpointingMixin, DecoderForSequenceClassification, LlamaPreTrainedModel):
    """The backbone and a score of the last token."""


ModelClass = LlamaForCausalLM
