"""One of the two models of a diff: its config, its normalised spec, its module tree and its source."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pilotage.arch.diff.tree import Node, tree_of
from pilotage.arch.modeling import ModelingSource, modeling_source, root_class
from pilotage.arch.spec import ArchSpec, hf_config

_SUFFIXES = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration|TextModel|Model)$")


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A part beside the language model, e.g. a vision tower.

    Attributes:
        name: its module name in the multimodal model.
        kind: its class.
        num_parameters: its size.
    """

    name: str
    kind: str
    num_parameters: int

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "num_parameters": self.num_parameters}


@dataclass(frozen=True, kw_only=True)
class Side:
    """What is known of one model.

    Attributes:
        name: the model as the user named it.
        raw: its config.json.
        fields: its config as transformers reads it, the nested language model's keys in place of the nesting.
        spec: its normalised config.
        tree: the module tree of its language model, or None where it could not be built.
        tree_error: why not.
        encoders: what the multimodal model has beside the language model.
        source: its modelling source, or None where transformers has none.
    """

    name: str
    raw: Mapping[str, Any]
    fields: Mapping[str, Any]
    spec: ArchSpec
    tree: Node | None
    tree_error: str | None
    encoders: tuple[Encoder, ...]
    source: ModelingSource | None

    @property
    def label(self) -> str:
        """A short name for sentences: the directory of a file, the last part of a path or hub id."""
        parts = [part for part in re.split(r"[/\\]", self.name) if part and part != "config.json"]
        return parts[-1].removesuffix(".json") if parts else self.name


def side(name: str, raw: Mapping[str, Any]) -> Side:
    """Read one model from its parsed config.json; loads and downloads no weights.

    Args:
        name: what to call it.
        raw: the parsed file.

    Raises:
        Unsupported, ConfigError: as `ArchSpec.from_hf`.
    """
    with _quiet():
        config = hf_config(raw)
        spec = ArchSpec.from_hf(raw)
        text = _text_config(config, spec)
        tree: Node | None = None
        error: str | None = None
        encoders: list[Encoder] = []
        try:
            tree, encoders = _build(config, text)
        except Exception as failure:  # a model class may need a package or kernel that is not here
            error = " ".join(str(failure).split())[:200] or type(failure).__name__
        return Side(
            name=name,
            raw=raw,
            fields=_fields(config, text),
            spec=spec,
            tree=tree,
            tree_error=error,
            encoders=tuple(encoders),
            source=modeling_source(text),
        )


def _text_config(config: Any, spec: ArchSpec) -> Any:
    if spec.wrapper_type is None:
        return config
    for found in (config, getattr(config, "thinker_config", None)):
        for key in ("text_config", "llm_config", "language_config", "decoder"):
            inner = getattr(found, key, None) if found is not None else None
            if inner is not None and getattr(inner, "model_type", None) == spec.model_type:
                return inner
    return config.get_text_config(decoder=True)


def _fields(config: Any, text: Any) -> dict[str, Any]:
    """The language model's keys, and those of the wrapper that it does not have."""
    inner = text.to_dict()
    if text is config:
        return inner
    outer = {
        key: value
        for key, value in config.to_dict().items()
        if not (isinstance(value, dict) and value.get("model_type") == text.model_type)
    }
    named = {key: outer[key] for key in ("architectures", "model_type", "tie_word_embeddings") if key in outer}
    return {**outer, **inner, **named, "text_config.model_type": text.model_type}


def _build(config: Any, text: Any) -> tuple[Node, list[Encoder]]:
    import torch
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    generates = text.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    # The meta device allocates nothing: a vocabulary of 262,144 rows costs as much as one of 10.
    with torch.device("meta"):
        language = (AutoModelForCausalLM if generates else AutoModel).from_config(text)
    prefix = _SUFFIXES.sub("", root_class(text) or "")
    tree = tree_of(language, "", prefix)
    encoders: list[Encoder] = []
    whole = _whole(config) if text is not config else None
    if whole is not None:
        encoders = list(_encoders(whole, type(language).__name__, type(getattr(language, "model", language)).__name__))
    if not generates:
        head = getattr(whole, "lm_head", None) if whole is not None else None
        children = [tree_of(language, "model", prefix)]
        if head is not None:
            children.append(tree_of(head, "lm_head", prefix))
        tree = Node(name="", kind="ForCausalLM", children=tuple(children))
    return tree, encoders


def _whole(config: Any) -> Any | None:
    """The multimodal model on the meta device, or None where its class is unknown or cannot be built."""
    import torch
    import transformers

    for name in config.architectures or ():
        architecture = getattr(transformers, name, None)
        if architecture is not None:
            with contextlib.suppress(Exception), torch.device("meta"):
                return architecture._from_config(config)
    auto = (transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM, transformers.AutoModel)
    for mapping in auto:
        with contextlib.suppress(Exception), torch.device("meta"):
            return mapping.from_config(config)
    return None


def _encoders(whole: Any, *language: str) -> Iterator[Encoder]:
    for name, module in whole.named_children():
        inner = [type(part).__name__ for part in module.modules()]
        if type(module).__name__ in language or name == "lm_head":
            continue
        if any(kind in language for kind in inner):
            for below in _encoders(module, *language):
                yield Encoder(name=f"{name}.{below.name}", kind=below.kind, num_parameters=below.num_parameters)
        elif count := sum(parameter.numel() for parameter in module.parameters()):
            yield Encoder(name=name, kind=type(module).__name__, num_parameters=count)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' advice about models that nobody is going to run off the user's terminal."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)
