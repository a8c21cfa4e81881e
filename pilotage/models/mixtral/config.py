"""The values of a Mixtral config that the model uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from pilotage.models.common.config import MoEConfig
from pilotage.models.common.reading import read


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(MoEConfig):
    """A Mixtral config; nothing beyond the common fields."""

    @classmethod
    def from_configs(cls, hf_config: Any, neuron_config: Any = None) -> Self:
        """Read a Hugging Face config.

        Args:
            hf_config: a `MixtralConfig` of transformers, or the parsed config.json.
            neuron_config: the target's settings; none of them changes this model.

        Raises:
            Unsupported: a value that the model does not implement, named by its key.
        """
        spec = read(hf_config, beyond=("num_experts",), layer_types=("full_attention", "sliding_attention"))
        # The config has no key for it: the architecture always divides the kept probabilities by their sum.
        return cls.from_moe_spec(spec, norm_topk_prob=True)
