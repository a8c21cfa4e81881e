"""Gemma 4: the training face."""

from __future__ import annotations

from transformers import Gemma4TextConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from pilotage.models.common.hf import DecoderPreTrainedModel
from pilotage.models.common.hf_checkpointing_mixin import HFCheckpointingMixin
from pilotage.models.common.hf_heads import DecoderForCausalLM
from pilotage.models.gemma4 import model


class Gemma4DecoderLayer(GradientCheckpointingLayer, model.Gemma4DecoderLayer):
    """The decoder layer that is served, which may recompute its activations."""


class Gemma4PreTrainedModel(DecoderPreTrainedModel):
    """What models with this backbone share."""

    config_class = Gemma4TextConfig
    architecture = model.Gemma4ForCausalLM
    layer_class = Gemma4DecoderLayer
    can_combine = False


class Gemma4ForCausalLM(HFCheckpointingMixin, DecoderForCausalLM, Gemma4PreTrainedModel):
    """The backbone and the head."""


ModelClass = Gemma4ForCausalLM
