"""DeepSeek-V3: the training face."""

from __future__ import annotations

from typing import Any

from transformers import DeepseekV3Config
from transformers.modeling_layers import GradientCheckpointingLayer

from pilotage.models.common.hf import DecoderPreTrainedModel
from pilotage.models.common.hf_checkpointing_mixin import HFCheckpointingMixin
from pilotage.models.common.hf_heads import DecoderForCausalLM
from pilotage.models.deepseek_v3 import model


class DeepseekV3DecoderLayer(GradientCheckpointingLayer, model.DeepseekV3DecoderLayer):
    """The decoder layer that is served, which may recompute its activations."""


class DeepseekV3PreTrainedModel(DecoderPreTrainedModel):
    """What models with this backbone share."""

    config_class = DeepseekV3Config
    architecture = model.DeepseekV3ForCausalLM
    layer_class = DeepseekV3DecoderLayer
    can_combine = False
    # Scores differ by less than half precision resolves.
    _keep_in_fp32_modules_strict: Any = ("e_score_correction_bias",)


class DeepseekV3ForCausalLM(HFCheckpointingMixin, DecoderForCausalLM, DeepseekV3PreTrainedModel):
    """The backbone and the head."""


ModelClass = DeepseekV3ForCausalLM
