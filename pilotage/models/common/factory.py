"""The class that vLLM's model registry gets for an architecture."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from torch import nn

from pilotage.models.common.backend import BackendConfig


class ServedByVllm(nn.Module):
    """Mixed in before a model class, adds the constructor that vLLM expects; all else that it asks for is the model's.

    Our worker builds models by `from_configs`; vLLM's registry inspects the class and may construct it.
    """

    config_class: ClassVar[Any]

    def __init__(
        self,
        config: Any = None,
        backend: BackendConfig | None = None,
        *,
        vllm_config: Any = None,
        prefix: str = "",
    ) -> None:
        if vllm_config is not None:
            config = self.config_class.from_configs(vllm_config.model_config.hf_config, None)
        super().__init__(config, backend)

    @classmethod
    def from_configs(cls, hf_config: Any, neuron_config: Any = None) -> Self:
        """Validate the configs and build the unquantised variant, the one there is; see `CausalLM.from_configs`."""
        return cls(cls.config_class.from_configs(hf_config, neuron_config))
