"""Our training classes as an option of NeMo AutoModel (the extra `pilotage[automodel]`).

Architectures that it does not have find ours by the entry points of this package. Those that it has keep its own class
until `register` puts ours in their place.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

from pilotage.core.errors import Unsupported
from pilotage.models import registry


def register(architectures: Sequence[str] | None = None) -> list[str]:
    """Let NeMo AutoModel build architectures by our classes.

    Args:
        architectures: names as in config.json; None for all that are trained here.

    Returns:
        The names that were registered.

    Raises:
        Unsupported: NeMo AutoModel is not installed, or an architecture is not trained here.
    """
    if importlib.util.find_spec("nemo_automodel") is None:
        raise Unsupported(
            "NeMo AutoModel is not installed", where="pilotage.models.automodel", do="pip install pilotage[automodel]"
        )
    names = list(registry.MODEL_ARCH_MAPPING) if architectures is None else list(architectures)
    automodel = importlib.import_module("nemo_automodel")
    for name in names:
        automodel.register_architecture(name, registry.training_class([name]), exist_ok=True)
        if "retrieval" in registry.tags_of(name):
            importlib.import_module("nemo_automodel._transformers.registry").ModelRegistry.register_retrieval(name)
    return names
