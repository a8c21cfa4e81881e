"""Gemma 2: the training face."""

from __future__ import annotations

from transformers import Gemma2Config
from transformers.modeling_layers import GradientCheckpointingLayer

from pilotage.models.common.hf import DecoderPreTrainedModel
from pilotage.models.common.hf_checkpointing_mixin import HFCheckpointingMixin
from pilotage.models.common.hf_heads import DecoderForCausalLM
from pilotage.models.gemma2 import model


class Gemma2DecoderLayer(GradientCheckpointingLayer, model.Gemma2DecoderLayer):
    """The decoder layer that is served, which may recompute its activations."""


class Gemma2PreTrainedModel(DecoderPreTrainedModel):
    """What models with this backbone share."""

    config_class = Gemma2Config
    architecture = model.Gemma2ForCausalLM
    layer_class = Gemma2DecoderLayer
    # sdpa does not bound the scores.
    _supports_sdpa = False


class Gemma2ForCausalLM(HFCheckpointingMixin, DecoderForCausalLM, Gemma2PreTrainedModel):
    """The backbone and the head."""


ModelClass = Gemma2ForCausalLM
