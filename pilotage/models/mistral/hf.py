"""Mistral: the training face."""

from __future__ import annotations

from transformers import MistralConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from pilotage.models.common.hf import DecoderPreTrainedModel
from pilotage.models.common.hf_checkpointing_mixin import HFCheckpointingMixin
from pilotage.models.common.hf_heads import DecoderForCausalLM, DecoderForSequenceClassification
from pilotage.models.llama3.model import LlamaDecoderLayer
from pilotage.models.mistral import model


class MistralDecoderLayer(GradientCheckpointingLayer, LlamaDecoderLayer):
    """The decoder layer that is served, which may recompute its activations."""


class MistralPreTrainedModel(DecoderPreTrainedModel):
    """What models with this backbone share."""

    config_class = MistralConfig
    architecture = model.MistralForCausalLM
    layer_class = MistralDecoderLayer


class MistralForCausalLM(HFCheckpointingMixin, DecoderForCausalLM, MistralPreTrainedModel):
    """The backbone and the head."""


class MistralForSequenceClassification(HFCheckpointingMixin, DecoderForSequenceClassification, MistralPreTrainedModel):
    """The backbone and a score of the last token."""


ModelClass = MistralForCausalLM
