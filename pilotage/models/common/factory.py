"""The class that vLLM's model registry gets for an architecture."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from torch import nn

from pilotage.models.common.backend import BackendConfig
from pilotage.weights.dequantise import Fp8Scheme

_KEY = "quantization_config"


class ServedByVllm(nn.Module):
    """Mixed in before a model class, adds the constructor that vLLM expects; all else that it asks for is the model's.

    Our worker builds models by `from_configs`; vLLM's registry inspects the class and may construct it.
    """

    config_class: ClassVar[Any]
    # Whether the weight map of this architecture takes linear layers in 8-bit floats.
    serves_fp8: ClassVar[bool] = False

    def __init__(
        self,
        config: Any = None,
        backend: BackendConfig | None = None,
        *,
        vllm_config: Any = None,
        prefix: str = "",
    ) -> None:
        if vllm_config is not None:
            config = self.configured(vllm_config.model_config.hf_config)
        super().__init__(config, backend)

    @classmethod
    def from_configs(cls, hf_config: Any, neuron_config: Any = None) -> Self:
        """Validate the configs and build the variant that they name; see `CausalLM.from_configs`.

        Plain weights, or 8-bit float weights with the checkpoint's own scales, which are dequantised while loading.

        Raises:
            Unsupported: another quantisation, or one that this architecture does not serve.
        """
        return cls(cls.configured(hf_config, neuron_config))

    @classmethod
    def configured(cls, hf_config: Any, neuron_config: Any = None) -> Any:
        """Return the model's config, its `fp8` set where the checkpoint's weights are 8-bit floats."""
        given = isinstance(hf_config, Mapping)
        quantization = hf_config.get(_KEY) if given else getattr(hf_config, _KEY, None)
        if quantization is not None and not isinstance(quantization, Mapping):
            quantization = quantization.to_dict()
        if not cls.serves_fp8 or not quantization:
            return cls.config_class.from_configs(hf_config, neuron_config)
        scheme = Fp8Scheme.from_config(quantization)
        if given:
            plain: Any = {key: value for key, value in hf_config.items() if key != _KEY}
        else:
            plain = copy.deepcopy(hf_config)
            del plain.quantization_config
            plain._name_or_path = ""  # where it is read from a file again, that still says it
        return dataclasses.replace(cls.config_class.from_configs(plain, neuron_config), fp8=scheme)
