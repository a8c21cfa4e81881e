"""`ArchSpec`: a Hugging Face config under one set of names.

Hugging Face configs name the same thing in several ways, nest the language model of a multimodal one, and fill in what
a `config.json` leaves out. Here every field has one name, knows the key it came from, and whether that key was stated
in the file or defaulted by the config class. What no field read is listed, so that nothing is dropped unseen.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pilotage.arch.fields import BOOKKEEPING, MODALITIES, Field, Reader
from pilotage.arch.rope import RopeSpec
from pilotage.arch.rules import FIELDS
from pilotage.core.errors import BadInput, ConfigError, PilotageError, Unsupported

__all__ = ["ArchSpec", "Field", "RopeSpec"]


@dataclass(frozen=True, kw_only=True)
class ArchSpec:
    """A normalised config. Values are attributes: `spec.hidden_size`, `spec.rope["full_attention"].theta`.

    Attributes:
        architecture: the class that `config.json` names, e.g. "Gemma3ForCausalLM"; None if it names none.
        model_type: Hugging Face's model type of the language model (of the nested one where there is a wrapper).
        wrapper_type: model type of the multimodal wrapper, or None.
        fields: every field by its name; `pilotage.arch.rules` documents them.
        unread: keys of the config that no field read and that change nothing known here; nested ones as
            "text_config.<key>".
    """

    architecture: str | None
    model_type: str
    wrapper_type: str | None
    fields: Mapping[str, Field]
    unread: tuple[str, ...]

    @classmethod
    def from_hf(cls, config: Any) -> ArchSpec:
        """Normalise a config.

        Args:
            config: a `PretrainedConfig`, or the parsed content of a `config.json`. Only the second knows for sure what
                was stated: for the first, a `config.json` beside its `_name_or_path` is read, and without one a value
                that differs from the class's default counts as stated.

        Raises:
            Unsupported: no config class of transformers for its `model_type`.
            ConfigError: a value that the config class refuses, or a rotary base that nobody states.
        """
        if isinstance(config, Mapping):
            raw = dict(config)
            config = hf_config(raw)
        else:
            raw = _stated(config)
        reader = Reader(_readable(config), raw)
        fields = {name: rule(reader) for name, rule in FIELDS.items()}
        architectures = raw.get("architectures") or getattr(config, "architectures", None) or [None]
        return cls(
            architecture=architectures[0],
            model_type=reader.text.model_type,
            wrapper_type=config.model_type if reader.prefix else None,
            fields=fields,
            unread=reader.unread(),
        )

    def __getattr__(self, name: str) -> Any:
        fields: Mapping[str, Field] = self.__dict__.get("fields") or {}
        if name in fields:
            return fields[name].value
        raise AttributeError(f"ArchSpec has no field {name!r}")

    def to_json(self) -> dict[str, Any]:
        """The spec as JSON-serialisable data."""
        return {
            "architecture": self.architecture,
            "model_type": self.model_type,
            "wrapper_type": self.wrapper_type,
            "fields": {name: found.to_json() for name, found in self.fields.items()},
            "unread": list(self.unread),
        }


def hf_config(raw: Mapping[str, Any]) -> Any:
    """The `PretrainedConfig` of a parsed `config.json`.

    Raises:
        Unsupported: no config class of transformers for its `model_type`.
        ConfigError: a value that the config class refuses.
    """
    from transformers import CONFIG_MAPPING

    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError("no model_type", where="config.json", do="name the architecture, e.g. llama")
    if model_type not in CONFIG_MAPPING:
        raise unknown_model_type(model_type, remote_code="auto_map" in raw)
    try:
        return CONFIG_MAPPING[model_type].from_dict(_with_floats(dict(raw)))
    except PilotageError:
        raise
    except Exception as error:  # config classes raise anything from KeyError to their own validation errors
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{model_type} config refused: {reason}", where="config.json", do="correct it") from error


def _with_floats(value: Any) -> Any:
    """A copy with transformers' spelling of infinities, which JSON lacks, read: {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        return (
            float(value["__float__"]) if set(value) == {"__float__"} else {k: _with_floats(v) for k, v in value.items()}
        )
    return [_with_floats(part) for part in value] if isinstance(value, list) else copy.deepcopy(value)


def unknown_model_type(model_type: str, *, remote_code: bool) -> Unsupported:
    """The error for a `model_type` without a config class, naming the nearest known ones."""
    import difflib

    from transformers import CONFIG_MAPPING, __version__

    near = difflib.get_close_matches(model_type, list(CONFIG_MAPPING), n=3)
    hint = f"the nearest known are {', '.join(near)}" if near else "check its spelling"
    if remote_code:
        hint = "it brings code of its own (auto_map), which is not run; port it from that code or use a known one"
    return Unsupported(
        f"model_type {model_type!r} is unknown to transformers {__version__}", where="config.json", do=hint
    )


def _readable(config: Any) -> Any:
    """A copy whose per-layer attributes may be read globally; transformers refuses that by default."""
    config = copy.copy(config)
    nested = [key for key in MODALITIES if getattr(config, key, None) is not None]
    for key in nested:
        sub_config = copy.copy(getattr(config, key))
        if getattr(sub_config, "is_heterogeneous", False):
            sub_config.allow_global_per_layer_attribute_access = True
        config.__dict__[key] = sub_config
    if getattr(config, "is_heterogeneous", False):
        config.allow_global_per_layer_attribute_access = True
    # It warns at each such read; here the override is read as well, right beside it.
    logging.getLogger("transformers.integrations.heterogeneity.configuration_utils").setLevel(logging.ERROR)
    return config


def _stated(config: Any) -> dict[str, Any]:
    """What a config object's file states, or else what differs from its class's defaults."""
    from pathlib import Path

    from pilotage.core.store import read_json

    origin = Path(str(getattr(config, "_name_or_path", "") or ""))
    for path in (origin, origin / "config.json"):
        if path.suffix == ".json" and path.is_file():
            try:
                stated = read_json(path)
            except BadInput:
                continue
            if isinstance(stated, dict) and stated.get("model_type") == config.model_type:
                return stated
    values = config.to_dict()
    try:
        defaults = type(config)().to_dict()
    except Exception:  # a class without a default for everything: then all of it was given
        defaults = {}
    architectures = {"architectures": config.architectures} if config.architectures else {}
    return architectures | _differing(values, defaults)


def _differing(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in values.items():
        default = defaults.get(key)
        if isinstance(value, dict) and isinstance(default, dict) and key in MODALITIES:
            found[key] = _differing(value, default)
        elif key not in BOOKKEEPING and (key not in defaults or value != default):
            found[key] = value
    return found
