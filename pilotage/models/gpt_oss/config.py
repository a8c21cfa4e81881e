"""The values of a gpt-oss config that the model uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from pilotage.models.common.config import MoEConfig
from pilotage.models.common.reading import read, refusal

_BEYOND = ("attention_bias", "attention_output_bias", "num_experts", "quantization")
# The checkpoint's own name, and what vLLM overwrites it with in the config that it hands on.
_MXFP4 = ("mxfp4", "gpt_oss_mxfp4")


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(MoEConfig):
    """A gpt-oss config.

    Attributes:
        swiglu_alpha, swiglu_limit: of the experts' clamped SwiGLU.
        mxfp4: the checkpoint holds the experts in MXFP4; they are dequantised while loading.
    """

    swiglu_alpha: float
    swiglu_limit: float
    mxfp4: bool = False

    @classmethod
    def from_configs(cls, hf_config: Any, neuron_config: Any = None) -> Self:
        """Read a Hugging Face config.

        Args:
            hf_config: a `GptOssConfig` of transformers, or the parsed config.json.
            neuron_config: the target's settings; none of them changes this model.

        Raises:
            Unsupported: a value that the model does not implement, named by its key; another
                quantisation than MXFP4 among them.
        """
        spec = read(hf_config, beyond=_BEYOND, layer_types=("full_attention", "sliding_attention"))
        if spec.quantization not in (None, *_MXFP4):
            raise refusal(spec, "quantization", f"{spec.quantization!r} is not implemented by this model", do="mxfp4")
        return cls.from_moe_spec(
            spec,
            swiglu_alpha=spec.swiglu_alpha,
            swiglu_limit=spec.swiglu_limit,
            mxfp4=spec.quantization in _MXFP4,
        )
