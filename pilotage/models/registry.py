"""Which architecture is served, and trained, by which class.

In-tree models are a table of strings; other packages add theirs by an entry point in the group `pilotage.models`, named
like the architecture in `config.json`: `AcmeForCausalLM = "acme_models.factory:AcmeForCausalLM"`. Nothing is imported
until an entry is loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from pilotage.core.errors import BadInput, Unsupported

GROUP = "pilotage.models"


@dataclass(frozen=True)
class ModelEntry:
    """A served architecture.

    Attributes:
        architecture: as in `architectures` of config.json.
        path: "module:Class" of its factory.
        tags: what else it is.
        origin: "pilotage", or the distribution that registered it.
    """

    architecture: str
    path: str
    tags: frozenset[str] = frozenset()
    origin: str = "pilotage"

    def load(self) -> Any:
        """Import the factory class.

        Raises:
            BadInput: the module or the class is not there.
        """
        module_name, _, class_name = self.path.partition(":")
        try:
            return getattr(importlib.import_module(module_name), class_name)
        except (ImportError, AttributeError) as error:
            raise BadInput(
                f"{self.path} cannot be loaded ({error})",
                where=f"{self.architecture} of {self.origin}",
                do=f"fix the entry point in the group {GROUP}",
            ) from error


_DENSE, _SPARSE = frozenset({"dense"}), frozenset({"moe"})
_IN_TREE = (
    ModelEntry("DeepseekV3ForCausalLM", "pilotage.models.deepseek_v3.factory:DeepseekV3ForCausalLM", _SPARSE),
    ModelEntry("Gemma2ForCausalLM", "pilotage.models.gemma2.factory:Gemma2ForCausalLM", _DENSE),
    ModelEntry("Gemma3ForCausalLM", "pilotage.models.gemma3.factory:Gemma3ForCausalLM", _DENSE),
    ModelEntry("Gemma4ForCausalLM", "pilotage.models.gemma4.factory:Gemma4ForCausalLM", _DENSE),
    ModelEntry("GptOssForCausalLM", "pilotage.models.gpt_oss.factory:GptOssForCausalLM", _SPARSE),
    ModelEntry("LlamaForCausalLM", "pilotage.models.llama3.factory:LlamaForCausalLM", _DENSE),
    ModelEntry("MistralForCausalLM", "pilotage.models.mistral.factory:MistralForCausalLM", _DENSE),
    ModelEntry("MixtralForCausalLM", "pilotage.models.mixtral.factory:MixtralForCausalLM", _SPARSE),
    ModelEntry("Qwen2ForCausalLM", "pilotage.models.qwen2.factory:Qwen2ForCausalLM", _DENSE),
    ModelEntry("Qwen3ForCausalLM", "pilotage.models.qwen3.factory:Qwen3ForCausalLM", _DENSE),
    ModelEntry("Qwen3MoeForCausalLM", "pilotage.models.qwen3_moe.factory:Qwen3MoeForCausalLM", _SPARSE),
)
# Multimodal architectures around one of those, served on text; a package of their own comes first.
_NESTED = frozenset({"text of multimodal"})
_WRAPPERS = tuple(
    ModelEntry(f"{name}ForConditionalGeneration", "pilotage.models.common.nested:TextOfMultimodal", _NESTED)
    for name in ("Gemma3", "Gemma4", "Llava", "LlavaNext", "Mistral3")
)


def entries() -> dict[str, ModelEntry]:
    """List every served architecture; an installed package may replace an in-tree one.

    Raises:
        BadInput: two installed packages claim one architecture.
    """
    found = {entry.architecture: entry for entry in (*_WRAPPERS, *_IN_TREE)}
    for point in entry_points(group=GROUP):
        origin = point.dist.name if point.dist is not None else "unknown"
        known = found.get(point.name)
        if known is not None and known.origin not in ("pilotage", origin):
            raise BadInput(
                f"both {known.origin} and {origin} register it", where=f"{GROUP}, {point.name}", do="uninstall one"
            )
        found[point.name] = ModelEntry(point.name, point.value, frozenset({"external"}), origin)
    return found


def text_models() -> list[str]:
    """Name the architectures that are language models themselves, not wrappers around one."""
    return sorted(name for name, entry in entries().items() if not entry.tags & _NESTED)


def find(architectures: Sequence[str]) -> ModelEntry | None:
    """Find the first of `architectures` that is served."""
    known = entries()
    return next((known[name] for name in architectures if name in known), None)


# Training classes: architecture -> (module, class) and, for some, tags.
MODEL_ARCH_MAPPING: OrderedDict[str, tuple[str, str] | tuple[str, str, set[str]]] = OrderedDict(
    [
        ("DeepseekV3ForCausalLM", ("pilotage.models.deepseek_v3.hf", "DeepseekV3ForCausalLM")),
        ("Gemma2ForCausalLM", ("pilotage.models.gemma2.hf", "Gemma2ForCausalLM")),
        ("Gemma3ForCausalLM", ("pilotage.models.gemma3.hf", "Gemma3ForCausalLM")),
        ("Gemma4ForCausalLM", ("pilotage.models.gemma4.hf", "Gemma4ForCausalLM")),
        ("GptOssForCausalLM", ("pilotage.models.gpt_oss.hf", "GptOssForCausalLM")),
        ("LlamaForCausalLM", ("pilotage.models.llama3.hf", "LlamaForCausalLM")),
        (
            "LlamaForSequenceClassification",
            ("pilotage.models.llama3.hf", "LlamaForSequenceClassification", {"retrieval"}),
        ),
        ("MistralForCausalLM", ("pilotage.models.mistral.hf", "MistralForCausalLM")),
        (
            "MistralForSequenceClassification",
            ("pilotage.models.mistral.hf", "MistralForSequenceClassification", {"retrieval"}),
        ),
        ("MixtralForCausalLM", ("pilotage.models.mixtral.hf", "MixtralForCausalLM")),
        ("Qwen2ForCausalLM", ("pilotage.models.qwen2.hf", "Qwen2ForCausalLM")),
        (
            "Qwen2ForSequenceClassification",
            ("pilotage.models.qwen2.hf", "Qwen2ForSequenceClassification", {"retrieval"}),
        ),
        ("Qwen3ForCausalLM", ("pilotage.models.qwen3.hf", "Qwen3ForCausalLM")),
        (
            "Qwen3ForSequenceClassification",
            ("pilotage.models.qwen3.hf", "Qwen3ForSequenceClassification", {"retrieval"}),
        ),
        ("Qwen3MoeForCausalLM", ("pilotage.models.qwen3_moe.hf", "Qwen3MoeForCausalLM")),
    ]
)


def tags_of(architecture: str) -> frozenset[str]:
    """Return the tags of a training class."""
    entry = MODEL_ARCH_MAPPING.get(architecture, ("", ""))
    return frozenset(entry[2]) if len(entry) == 3 else frozenset()


def training_class(architectures: Sequence[str]) -> Any:
    """Import the class that trains the first of `architectures` that is known.

    A package that serves an architecture by an entry point trains it by the `ModelClass` of its `hf.py`, and comes
    before what is in the tree.

    Raises:
        Unsupported: none of them is trained here.
        BadInput: the module or the class is not there.
    """
    for name in architectures:
        entry = entries().get(name)
        if entry is not None and entry.origin != "pilotage":
            module = f"{entry.path.partition(':')[0].rpartition('.')[0]}.hf"
            if importlib.util.find_spec(module) is not None:
                return ModelEntry(name, f"{module}:ModelClass", origin=entry.origin).load()
        if name in MODEL_ARCH_MAPPING:
            module, attribute = MODEL_ARCH_MAPPING[name][:2]
            return ModelEntry(name, f"{module}:{attribute}").load()
    raise Unsupported(
        f"no training class for {', '.join(architectures) or 'an unnamed architecture'}",
        where="config.json, architectures",
        do=f"train one of {', '.join(MODEL_ARCH_MAPPING)}, or write hf.py beside the model's factory",
    )
