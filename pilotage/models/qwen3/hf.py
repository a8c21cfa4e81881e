"""Qwen3: the training face."""

from __future__ import annotations

from transformers import Qwen3Config
from transformers.modeling_layers import GradientCheckpointingLayer

from pilotage.models.common.hf import DecoderPreTrainedModel
from pilotage.models.common.hf_checkpointing_mixin import HFCheckpointingMixin
from pilotage.models.common.hf_heads import DecoderForCausalLM, DecoderForSequenceClassification
from pilotage.models.qwen3 import model


class Qwen3DecoderLayer(GradientCheckpointingLayer, model.Qwen3DecoderLayer):
    """The decoder layer that is served, which may recompute its activations."""


class Qwen3PreTrainedModel(DecoderPreTrainedModel):
    """What models with this backbone share."""

    config_class = Qwen3Config
    architecture = model.Qwen3ForCausalLM
    layer_class = Qwen3DecoderLayer


class Qwen3ForCausalLM(HFCheckpointingMixin, DecoderForCausalLM, Qwen3PreTrainedModel):
    """The backbone and the head."""


class Qwen3ForSequenceClassification(HFCheckpointingMixin, DecoderForSequenceClassification, Qwen3PreTrainedModel):
    """The backbone and a score of the last token."""


ModelClass = Qwen3ForCausalLM
