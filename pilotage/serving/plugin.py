"""Entry points that vLLM finds by itself: the platform and the models.

Both run in every process that imports vLLM, so they import nothing heavy at the top.
"""

from __future__ import annotations

import logging
import os

from pilotage.core.environment import switched_on

PLATFORM = "pilotage.serving.platform.PilotagePlatform"


def platform() -> str | None:
    """Return the path of the platform class, or None where `PILOTAGE_DISABLE=1` asks for vLLM as it is."""
    if switched_on("PILOTAGE_DISABLE"):
        return None
    # The worker here is written against the first runner interface; the second needs Triton.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    return PLATFORM


def register_models() -> None:
    """Register every known model with vLLM, in place of a class of its own with the same name.

    A package that cannot be imported is reported and left out: it must not stop the others from being served.
    """
    if switched_on("PILOTAGE_DISABLE"):
        return
    from vllm import ModelRegistry

    from pilotage.models import registry

    for architecture, entry in registry.entries().items():
        try:
            ModelRegistry.register_model(architecture, entry.load())
        except Exception as error:
            logging.getLogger("vllm.pilotage").warning(
                "model %s from %s cannot be used: %s: %s", architecture, entry.origin, type(error).__name__, error
            )
    from pilotage.serving.fallback.config import register_with_vllm

    register_with_vllm()
