"""Does vLLM, left to itself, find this platform and the class of an architecture?"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

_GROUPS = {"vllm.platform_plugins": "the platform is", "vllm.general_plugins": "the models are"}


def check(architecture: str) -> list[dict[str, Any]]:
    """Load vLLM's plugins as vLLM does, and look at what it then holds.

    Args:
        architecture: as in `architectures` of config.json.

    Returns:
        [{"claim", "found", "ok"}], one for each thing that has to be so.
    """
    checks = []
    for group, what in _GROUPS.items():
        ours = [point for point in entry_points(group=group) if point.value.startswith("pilotage.")]
        checks.append(
            {
                "claim": f"{what} found through the entry point group {group}",
                "found": ", ".join(f"{point.name} = {point.value}" for point in ours) or "none",
                "ok": len(ours) == 1,
            }
        )
    from pilotage.serving.launch import require_platform

    require_platform()
    from vllm import ModelRegistry
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    kind = type(current_platform)
    checks.append(
        {"claim": "vLLM picks the platform by itself", "found": f"{kind.__module__}.{kind.__qualname__}", "ok": True}
    )
    load_general_plugins()
    from pilotage.models import registry

    entry = registry.find([architecture])
    checks.append(
        {
            "claim": f"the model registry knows {architecture}",
            "found": f"{entry.path} of {entry.origin}" if entry else "nothing",
            "ok": entry is not None,
        }
    )
    wanted = entry.load() if entry is not None else None
    held = ModelRegistry.models.get(architecture)
    found = held.load_model_cls() if held is not None else None
    checks.append(
        {
            "claim": f"vLLM serves {architecture} with that class, in place of its own",
            "found": f"{found.__module__}.{found.__qualname__}" if found is not None else "no class",
            "ok": found is not None and found is wanted,
        }
    )
    return checks
