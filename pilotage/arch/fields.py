"""What the rules of an `ArchSpec` are written with: a field, and the reader that remembers what was read."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pilotage.arch.modeling import ModelingSource, modeling_source
from pilotage.arch.rope import RopeSpec

# "Class.attribute = config.key", or its inverse square root: the value is that key's.
_CONFIG_KEY = re.compile(r"[=:] ?(?:bias=)?(?:self\.)?config\.(\w+)(?: \*\* \(-0\.5\))?$")

TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config", "decoder")
ENCODER_KEYS = {
    "vision_config": "vision",
    "vision_tower_config": "vision",
    "audio_config": "audio",
    "audio_encoder_config": "audio",
    "speech_config": "audio",
}
MODALITIES = (*TEXT_KEYS, *ENCODER_KEYS)

# Keys that change nothing in the architecture: training settings, generation defaults, records of the saver.
BOOKKEEPING = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "_sliding_window_pattern",
        "architectures",
        "attention_dropout",
        "attn_pdrop",
        "auto_map",
        "aux_loss_alpha",
        "cache_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "embd_pdrop",
        "ep_size",
        "gradient_checkpointing",
        "hidden_dropout",
        "hidden_dropout_prob",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pretraining_tp",
        "problem_type",
        "resid_pdrop",
        "residual_dropout",
        "return_dict",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "seq_aux",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "unsloth_fixed",
        "use_cache",
    }
)


@dataclass(frozen=True, kw_only=True)
class Field:
    """One value of a spec.

    Attributes:
        value: the normalised value; None where the architecture has no such thing.
        source_key: the config key it was read from ("text_config.rope_parameters"), "source: <expression>" where only
            the modelling source says so, "derived: <from what>", or None where nothing says so.
        stated: the key is in the config.json (or the source says it); False where the config class defaulted it.
    """

    value: Any
    source_key: str | None
    stated: bool

    def to_json(self) -> dict[str, Any]:
        return {"value": jsonable(self.value), "source_key": self.source_key, "stated": self.stated}


def jsonable(value: Any) -> Any:
    """`value` with specs, tuples and dtypes turned into what JSON has."""
    if isinstance(value, RopeSpec):
        return value.to_json()
    if isinstance(value, Mapping):
        return {str(key): jsonable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(inner) for inner in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


class Reader:
    """Reads keys of a config and remembers which.

    Args:
        config: the outer `PretrainedConfig`.
        raw: what its config.json states.
    """

    def __init__(self, config: Any, raw: Mapping[str, Any]) -> None:
        self.config = config
        self.raw = raw
        self.prefix = next((key for key in TEXT_KEYS if is_config(getattr(config, key, None))), "")
        self.text: Any = getattr(config, self.prefix) if self.prefix else config
        if self.prefix and is_config(getattr(self.text, "text_config", None)):  # omni models nest twice
            self.text, self.prefix = self.text.text_config, f"{self.prefix}.text_config"
        nested: Any = raw
        for key in self.prefix.split(".") if self.prefix else ():
            nested = nested.get(key) if isinstance(nested, Mapping) else None
        # Older multimodal files are flat; transformers moves their keys into a text_config that they do not have.
        self.flat = bool(self.prefix) and not isinstance(nested, Mapping)
        self.text_raw: Mapping[str, Any] = nested if isinstance(nested, Mapping) else raw
        self._read: set[str] = set()

    def key(self, name: str) -> str:
        """`name` as the file spells its place."""
        return name if self.flat or not self.prefix else f"{self.prefix}.{name}"

    def mark(self, *names: str) -> None:
        """Count keys of the language model's config as read."""
        self._read.update(self.key(name) for name in names)

    def mark_outer(self, name: str) -> None:
        """Count a key of the wrapper's config as read."""
        self._read.add(name)

    def states(self, name: str) -> bool:
        """Whether the file states a key of the language model's config, under this name or an alias of it."""
        return any(alias in self.text_raw for alias in self._aliases(name))

    def _aliases(self, name: str) -> tuple[str, ...]:
        renamed: Mapping[str, str] = getattr(type(self.text), "attribute_map", {})
        return (
            name,
            *(alias for alias, real in renamed.items() if real == name),
            *((renamed[name],) if name in renamed else ()),
        )

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a key of the language model's config, counted as read."""
        self.mark(*self._aliases(name))
        value = getattr(self.text, name, None)
        if value is None and name in self.text_raw:
            value = self.text_raw[name]
        return default if value is None else value

    def first(self, names: Iterable[str], default: Any = None) -> Field:
        """The first of several keys that has a value; all of them count as read."""
        found: Field | None = None
        names = tuple(names)
        for name in names:
            value = self.get(name)
            if value is not None and found is None:
                spelled = next((alias for alias in self._aliases(name) if alias in self.text_raw), name)
                found = Field(value=value, source_key=self.key(spelled), stated=self.states(name))
        if found is None:
            named = next((name for name in names if hasattr(self.text, name)), None)
            stated = named is not None and self.states(named)
            found = Field(value=default, source_key=self.key(named) if named else None, stated=stated)
        return found

    @functools.cached_property
    def source(self) -> ModelingSource | None:
        """The modelling source of the language model."""
        return modeling_source(self.text)

    def fact(self, read: Callable[[ModelingSource], tuple[Any, str] | None]) -> Field | None:
        """A value that the modelling source states."""
        found = read(self.source) if self.source else None
        if found is None:
            return None
        value, expression = found
        key = _CONFIG_KEY.search(expression)
        if key:  # the source only passes a config key on
            self.mark(key[1])
            return Field(value=value, source_key=self.key(key[1]), stated=self.states(key[1]))
        return Field(value=value, source_key=f"source: {expression}", stated=True)

    def unread(self) -> tuple[str, ...]:
        """Keys of the file that no rule read, in their order."""
        text_keys = [self.key(key) for key in self.text_raw if key not in BOOKKEEPING]
        outer = [key for key in self.raw if key not in BOOKKEEPING] if self.prefix and not self.flat else []
        generation = _generation_keys()
        nested = self.prefix.split(".")[0] if self.prefix else None
        return tuple(
            key
            for key in dict.fromkeys([*outer, *text_keys])
            if key not in self._read and key != nested and key.rpartition(".")[2] not in generation
        )


@functools.cache
def _generation_keys() -> frozenset[str]:
    from transformers import GenerationConfig

    return frozenset(GenerationConfig().to_dict()) - {"bos_token_id", "eos_token_id", "pad_token_id"}


def is_config(value: Any) -> bool:
    return value is not None and hasattr(value, "model_type") and hasattr(value, "to_dict")
