"""The language model inside a multimodal checkpoint, served on text alone.

Its config is nested in the wrapper's, its tensors carry the wrapper's prefix, and the towers' tensors are dropped with
the reason in the ledger. Text prompts give what the whole model gives: towers are run for other inputs only.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any, Self

from pilotage.core.errors import ConfigError, Unsupported
from pilotage.models.common.causal_lm import CausalLM
from pilotage.models.common.factory import ServedByVllm
from pilotage.weights import WeightMap
from pilotage.weights.map import Plan, Problem

_LOG = logging.getLogger("vllm.pilotage")
# What wrappers put before the language model's names: files of transformers 4, and of 5.
_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_TOWERS = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|audio_tower|audio_model|multi_modal_projector|mm_projector"
    r"|embed_vision|embed_audio|vision_embedder|image_newline)(\..*)?$"
)
_REASON = "of a tower for other inputs than text, which are not served"


class NestedMap(WeightMap):
    """A language model's map under the names that a wrapper's checkpoint has.

    Args:
        inner: the map of the language model alone.
    """

    def __init__(self, inner: WeightMap) -> None:
        super().__init__([*inner.rules, *inner.ties, *inner.drops])
        self._inner = inner

    def plan(self, checkpoint_names: Iterable[str], parameter_names: Iterable[str] | None = None) -> Plan:
        """Match names as the language model's map does, towers left out; nothing is read."""
        outer: dict[str, str] = {}
        drops: dict[str, str] = {}
        problems: list[Problem] = []
        for name in checkpoint_names:
            if _TOWERS.match(name):
                drops[name] = _REASON
                continue
            inside = _inner_name(name)
            if inside in outer:
                problems.append(Problem("double", name, f"it is the language model's {inside}, as is {outer[inside]}"))
            outer[inside] = name
        plan = self._inner.plan(outer, parameter_names)
        return Plan(
            steps=tuple(dataclasses.replace(step, hf=tuple(outer.get(n, n) for n in step.hf)) for step in plan.steps),
            ties={parameter: outer.get(name, name) for parameter, name in plan.ties.items()},
            drops={outer.get(name, name): reason for name, reason in plan.drops.items()} | drops,
            copies={outer.get(a, a): outer.get(b, b) for a, b in plan.copies.items()},
            problems=(*problems, *(dataclasses.replace(p, name=outer.get(p.name, p.name)) for p in plan.problems)),
        )


def _inner_name(name: str) -> str:
    for outside, inside in _PREFIXES:
        if name.startswith(outside):
            return inside + name.removeprefix(outside)
    return name


class TextOfMultimodal(ServedByVllm, CausalLM):
    """What the registry has for a multimodal architecture: it builds the package of the language model inside."""

    @classmethod
    def from_configs(cls, hf_config: Any, neuron_config: Any = None) -> Self:
        """Build the language model of a wrapper's config.

        Raises:
            ConfigError: no language model is nested in the config.
            Unsupported: no package serves it.
        """
        from pilotage.arch.modeling import root_class
        from pilotage.arch.spec import hf_config as parsed
        from pilotage.models import registry

        config = parsed(hf_config) if isinstance(hf_config, Mapping) else hf_config
        text = config.get_text_config(decoder=True)
        if text is config:
            raise ConfigError(f"{config.model_type} has no nested language model", where="config.json, text_config")
        architecture = root_class(text) or text.model_type
        entry = registry.find([architecture])
        if entry is None or entry.path.endswith(f":{cls.__name__}"):
            raise Unsupported(
                f"its language model {architecture} has no model package",
                where=f"config.json, text_config of {config.model_type}",
                do=f"port it (`pilotage new`); served are {', '.join(registry.text_models())}",
            )
        _LOG.warning(
            "%s: its language model %s is served, on text prompts only; images, audio and video are not",
            config.model_type,
            architecture,
        )
        return _nested(entry.load()).from_configs(hf_config, neuron_config)


def _nested(factory: Any) -> Any:
    """The factory of a language model, with the names of a wrapper's checkpoint."""

    class Nested(factory):
        weight_map = staticmethod(lambda config: NestedMap(factory.weight_map(config)))

    Nested.__name__ = Nested.__qualname__ = factory.__name__
    Nested.__module__ = factory.__module__
    return Nested
