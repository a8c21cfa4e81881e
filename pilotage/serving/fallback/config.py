"""What the fallback needs of vLLM's configuration, and which architectures it may try."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from pilotage.core.config import TargetConfig
from pilotage.core.errors import Unsupported

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_LOG = logging.getLogger("vllm.pilotage")


@cache
def architectures() -> dict[str, str]:
    """List what transformers generates text with alone: class name -> model type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found: dict[str, str] = {}
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if not name.endswith("ForConditionalGeneration"):
            found.setdefault(name, model_type)
    return found


def find(names: Sequence[str]) -> str | None:
    """Find the first of `names` that the fallback may try; whether it is served shows when it is loaded."""
    return next((name for name in names if name in architectures()), None)


def register_with_vllm() -> None:
    """Give vLLM's registry the fallback for every architecture of transformers that has no model package.

    vLLM's own classes of the same names are replaced: none of them runs on this platform.
    """
    from vllm import ModelRegistry

    from pilotage.models import registry
    from pilotage.serving.fallback.model import FallbackForCausalLM

    known = registry.entries()
    for name in architectures():
        held = ModelRegistry.models.get(name)
        other = held is not None and not str(getattr(held, "module_name", "vllm.")).startswith("vllm.")
        if name not in known and not other:  # a class that another plugin registered stays
            ModelRegistry.models.pop(name, None)  # or vLLM warns that it is replaced
            ModelRegistry.register_model(name, FallbackForCausalLM)


def prepare(vllm_config: VllmConfig) -> None:
    """Adapt the configuration of a model without a package, and refuse what the fallback does not do.

    Raises:
        Unsupported: a setting that needs a model package.
    """
    from pilotage.serving.fallback.model import WRITE, require_length

    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    stated: Any = vllm_config.additional_config
    config = TargetConfig.from_additional_config(stated)
    name = str(find(model_config.architectures))
    refusals = [
        (
            parallel.tensor_parallel_size > 1 and model_config.is_moe,
            f"tensor_parallel_size={parallel.tensor_parallel_size} for a mixture of experts",
        ),
        (config.tensor_capture is not None, "tensor_capture"),
        (config.tensor_replacement is not None, "tensor_replacement"),
        (config.on_device_sampling_config is not None, "on_device_sampling_config"),
    ]
    for refused, what in refusals:
        if refused:
            raise Unsupported(
                f"it has no model package, and the fallback that would serve it has no {what}", where=name, do=WRITE
            )
    require_length(model_config.hf_text_config, model_config.max_model_len, name)
    if not model_config.enforce_eager:
        _LOG.warning("%s has no model package: the day-zero fallback serves it, and compiles nothing", name)
    model_config.enforce_eager = True
