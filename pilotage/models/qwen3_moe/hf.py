"""Qwen3-MoE: the training face."""

from __future__ import annotations

from transformers import Qwen3MoeConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from pilotage.models.common.hf import DecoderPreTrainedModel
from pilotage.models.common.hf_checkpointing_mixin import HFCheckpointingMixin
from pilotage.models.common.hf_heads import SparseForCausalLM
from pilotage.models.qwen3_moe import model


class Qwen3MoeDecoderLayer(GradientCheckpointingLayer, model.Qwen3MoeDecoderLayer):
    """The decoder layer that is served, which may recompute its activations."""


class Qwen3MoePreTrainedModel(DecoderPreTrainedModel):
    """What models with this backbone share."""

    config_class = Qwen3MoeConfig
    architecture = model.Qwen3MoeForCausalLM
    layer_class = Qwen3MoeDecoderLayer


class Qwen3MoeForCausalLM(HFCheckpointingMixin, SparseForCausalLM, Qwen3MoePreTrainedModel):
    """The backbone and the head."""


ModelClass = Qwen3MoeForCausalLM
