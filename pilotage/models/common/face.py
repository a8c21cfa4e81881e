"""The names of a package's training face, importable from its `model.py` without importing transformers there."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

_SUFFIXES = ("PreTrainedModel", "ForSequenceClassification")


def training_face(model_module: str) -> Callable[[str], Any]:
    """Make the `__getattr__` of a `model.py`: `ModelClass` and its relatives, from `hf.py` beside it.

    Args:
        model_module: the module's `__name__`.
    """

    def find(name: str) -> Any:
        if name == "ModelClass" or name.endswith(_SUFFIXES):
            face = importlib.import_module(f"{model_module.rpartition('.')[0]}.hf")
            if hasattr(face, name):
                return getattr(face, name)
        raise AttributeError(f"module {model_module!r} has no attribute {name!r}")

    return find
