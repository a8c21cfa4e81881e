"""Gemma 3: the training face."""

from __future__ import annotations

from transformers import Gemma3TextConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from pilotage.models.common.hf import DecoderPreTrainedModel
from pilotage.models.common.hf_checkpointing_mixin import HFCheckpointingMixin
from pilotage.models.common.hf_heads import DecoderForCausalLM
from pilotage.models.gemma3 import model


class Gemma3DecoderLayer(GradientCheckpointingLayer, model.Gemma3DecoderLayer):
    """The decoder layer that is served, which may recompute its activations."""


class Gemma3PreTrainedModel(DecoderPreTrainedModel):
    """What models with this backbone share."""

    config_class = Gemma3TextConfig
    architecture = model.Gemma3ForCausalLM
    layer_class = Gemma3DecoderLayer


class Gemma3ForCausalLM(HFCheckpointingMixin, DecoderForCausalLM, Gemma3PreTrainedModel):
    """The backbone and the head."""


ModelClass = Gemma3ForCausalLM
