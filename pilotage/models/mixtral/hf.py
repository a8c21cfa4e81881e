"""Mixtral: the training face."""

from __future__ import annotations

from transformers import MixtralConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from pilotage.models.common.hf import DecoderPreTrainedModel
from pilotage.models.common.hf_checkpointing_mixin import HFCheckpointingMixin
from pilotage.models.common.hf_heads import SparseForCausalLM
from pilotage.models.mixtral import model


class MixtralDecoderLayer(GradientCheckpointingLayer, model.MixtralDecoderLayer):
    """The decoder layer that is served, which may recompute its activations."""


class MixtralPreTrainedModel(DecoderPreTrainedModel):
    """What models with this backbone share."""

    config_class = MixtralConfig
    architecture = model.MixtralForCausalLM
    layer_class = MixtralDecoderLayer


class MixtralForCausalLM(HFCheckpointingMixin, SparseForCausalLM, MixtralPreTrainedModel):
    """The backbone and the head."""


ModelClass = MixtralForCausalLM
