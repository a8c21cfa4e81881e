"""The documented import path of tensor replacement."""

from pilotage.probe.reference import TensorReplacementConfig, load_replacer, save_reference
from pilotage.probe.replacement import (
    ReplacementContext,
    TensorReplacer,
    flatten_steps,
    get_replacement_tensor,
    set_active_context,
)

__all__ = [
    "ReplacementContext",
    "TensorReplacementConfig",
    "TensorReplacer",
    "flatten_steps",
    "get_replacement_tensor",
    "load_replacer",
    "save_reference",
    "set_active_context",
]
