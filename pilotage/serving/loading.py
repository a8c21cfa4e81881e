"""From vLLM's configuration to a loaded model of a pilotage package."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pilotage.core.config import TargetConfig
from pilotage.core.errors import BadInput, Unsupported, WeightError
from pilotage.serving import head_screen, kv_scales, memory

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def find_factory(architectures: Sequence[str]) -> Any | None:
    """Return the factory class for the first known of `architectures`, or None.

    Known are the packages of `pilotage.models.registry`, and classes with `from_configs` that a plugin registered with
    vLLM's own registry, as the guide shows.
    """
    from pilotage.models import registry

    entry = registry.find(list(architectures))
    if entry is not None:
        return entry.load()
    from vllm import ModelRegistry

    for architecture in architectures:
        registered = ModelRegistry.models.get(architecture)
        module = getattr(registered, "module_name", None)
        if registered is None or (module or "").startswith("vllm."):
            continue
        found = registered.load_model_cls()
        if hasattr(found, "from_configs"):
            return found
    return None


@contextlib.contextmanager
def _built_as(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(previous)


def load_model(
    vllm_config: VllmConfig, *, device: torch.device | None = None, cache_8bit: bool = False
) -> tuple[torch.nn.Module, Any]:
    """Build the model on the meta device and load this rank's weights.

    Args:
        vllm_config: vLLM's configuration.
        device: where the weights go; None for host memory.
        cache_8bit: whether its keys and values are cached as 8-bit floats, with the checkpoint's scales.

    Returns:
        The model, and the ledger that says which checkpoint tensor went where; None for the fallback, where
        transformers loads.

    Raises:
        Unsupported: no model package serves this architecture, nor does the fallback.
        BadInput: the checkpoint directory does not exist.
        WeightError: the checkpoint does not match the model.
        ConfigError: an 8-bit cache, and the checkpoint has no scales.
    """
    model_config = vllm_config.model_config
    factory = find_factory(model_config.architectures)
    device = torch.device("cpu") if device is None else device
    if factory is None:
        if device.type != "cpu":
            raise Unsupported(
                "the fallback reads pages in host memory", where=f"target {device.type}", do="write a model package"
            )
        from pilotage.serving.fallback import load as fallback

        return fallback.load(
            checkpoint(model_config.model),
            dtype=model_config.dtype,
            max_model_len=model_config.max_model_len,
            free_bytes=memory.free_bytes(),
        ), None
    target = TargetConfig.from_additional_config(vllm_config.additional_config)
    with _built_as(model_config.dtype):
        model = factory.from_configs(model_config.hf_config, target)
    ledger = model.load_weights(str(checkpoint(model_config.model)), device)
    model.eval()
    model.requires_grad_(False)
    require_finite(model, model_config.model)
    head_screen.attach(model, target.screen_lm_head)
    if cache_8bit:
        kv_scales.attach(model, checkpoint(model_config.model), unscaled=target.unscaled_fp8_kv_cache)
    return model, ledger


def require_finite(model: torch.nn.Module, where: str) -> None:
    """Raise if a weight is NaN or infinite: a model that has one answers every request with nonsense.

    Raises:
        WeightError: names the parameters.
    """
    bad = []
    for name, parameter in model.named_parameters():
        if parameter.dtype in (torch.float32, torch.bfloat16, torch.float16) and parameter.numel():
            low, high = torch.aminmax(parameter)  # NaN anywhere makes both NaN
            if not bool(torch.isfinite(low) & torch.isfinite(high)):
                bad.append(name)
    if bad:
        named = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
        raise WeightError(
            f"not finite (NaN or infinity): {named}", where=where, do="the checkpoint is damaged: fetch it again"
        )


def checkpoint(model: str) -> Path:
    """Return the local directory of `model`.

    Raises:
        BadInput: it cannot be found.
    """
    path = Path(model)
    if path.is_dir():
        return path
    if path.is_absolute() or model.startswith("."):
        raise BadInput("no such directory", where=model)
    from pilotage.arch import source

    return source.resolve(model)
