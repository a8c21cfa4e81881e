"""From a recipe to a model, its tokenizer, and adapters where they are asked for."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch

from pilotage.arch import source
from pilotage.core.errors import BadInput, ConfigError, Unavailable, Unsupported
from pilotage.training.engine import deterministic
from pilotage.training.recipe import LoraSection, ModelSection, Recipe

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ADAPTER_FILE = "adapter_model"


def tokenizer(section: ModelSection, start: Path | None) -> Any:
    """Load the tokenizer.

    Raises:
        BadInput: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    where = section.tokenizer or start
    loader: Any = AutoTokenizer
    path = source.config_dir(str(where)) if not Path(str(where)).is_dir() else where
    try:
        return loader.from_pretrained(str(path))
    except (OSError, ValueError) as error:
        raise BadInput(f"no tokenizer can be loaded ({error})", where=str(where)) from error


def config(section: ModelSection, tokenizer: Any) -> Any:
    """Build the configuration of a new model; special tokens and vocabulary come from the tokenizer where not stated.

    Raises:
        ConfigError: no model_type, or one that is not known; a vocabulary smaller than the tokenizer's.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    given = section.config
    if isinstance(given, str):
        from pilotage.core import store

        given = store.read_json(Path(given) / "config.json" if Path(given).is_dir() else Path(given))
    values = dict(given or {})
    kind = values.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise ConfigError(f"model_type {kind!r} is not known", where="model.config", do="write e.g. model_type: llama")
    tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    values = {"vocab_size": len(tokenizer), **tokens, **values}
    if values["vocab_size"] < len(tokenizer):
        raise ConfigError(
            f"{values['vocab_size']} is less than the tokenizer's {len(tokenizer)}", where="model.config.vocab_size"
        )
    values.pop("model_type")
    known: Any = AutoConfig
    return known.for_model(kind, **values)


def architectures(config: Any) -> list[str]:
    """Name the architectures of a configuration, stated or as transformers would choose."""
    if config.architectures:
        return list(config.architectures)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]


def model_class(section: ModelSection, names: list[str]) -> Any:
    """Choose the class that is trained.

    Raises:
        Unsupported: there is none of ours.
    """
    if section.implementation == "transformers":
        import transformers

        return getattr(transformers, names[0])
    from pilotage.models import registry

    return registry.training_class(names)


def model(recipe: Recipe, start: Path | None, tokenizer: Any) -> Any:
    """Load or make the model on the CPU, every process the same.

    Raises:
        Unsupported, ConfigError: see `config` and `model_class`.
    """
    section, dtype = recipe.model, DTYPES[recipe.model.dtype]
    how: dict[str, Any] = {"dtype": dtype, "attn_implementation": section.attention}
    with _quiet(), deterministic(recipe.seed):
        if start is not None:
            stated = json.loads((start / "config.json").read_text())
            names = stated.get("architectures") or []
            built = model_class(section, names).from_pretrained(start, **how)
        else:
            made = config(section, tokenizer)
            made.architectures = architectures(made)
            cls = model_class(section, made.architectures)
            build = cls.from_config if hasattr(cls, "from_config") else cls._from_config
            built = build(made, **how)
        if section.gradient_checkpointing:
            built.gradient_checkpointing_enable({"use_reentrant": False})
        if recipe.lora is not None:
            add_adapters(built, recipe.lora)
    return built.train()


class _quiet:
    """Silence the loading bars of transformers."""

    def __enter__(self) -> None:
        from transformers.utils import logging as hf_logging

        self.verbosity, self.bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
        hf_logging.set_verbosity(logging.ERROR)
        hf_logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        from transformers.utils import logging as hf_logging

        hf_logging.set_verbosity(self.verbosity)
        if self.bars:
            hf_logging.enable_progress_bar()


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise Unavailable(
            "the package peft is not installed", where="lora", do="pip install pilotage[train]"
        ) from error
    return peft


def adapter_config(section: LoraSection, base: str | None = None) -> Any:
    """Build peft's configuration.

    Raises:
        Unavailable: peft is not installed.
    """
    return _peft().LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        target_modules=list(section.targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )


def add_adapters(model: Any, section: LoraSection) -> None:
    """Put low-rank adapters beside the target layers, in place; nothing else is trained any more.

    Raises:
        Unavailable: peft is not installed.
        Unsupported: no layer has such a name.
    """
    leaves = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    unknown = [target for target in section.targets if target not in leaves]
    if unknown:
        raise Unsupported(
            f"no layer is called {unknown[0]}", where="lora.targets", do=f"use {', '.join(sorted(leaves))}"
        )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    _peft().inject_adapter_in_model(adapter_config(section), model)


def adapter_name(name: str) -> str:
    """Return the name that peft's files have for an adapter's parameter."""
    return "base_model.model." + name.replace(".default.", ".")


def merged(recipe: Recipe, start: Path, tokenizer: Any, adapters: Path) -> Any:
    """Load the base model again and add what its adapters have learned into its own weights.

    Args:
        recipe: has `lora`.
        start: the base model.
        tokenizer: its tokenizer.
        adapters: a checkpoint of the run.
    """
    from safetensors.torch import load_file

    built = model(recipe, start, tokenizer)
    learned = load_file(adapters / f"{ADAPTER_FILE}.safetensors")
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(learned[adapter_name(name)])
    layers = _peft().tuners.lora.LoraLayer
    for path, module in [(path, found) for path, found in built.named_modules() if isinstance(found, layers)]:
        module.merge()
        owner, _, leaf = path.rpartition(".")
        setattr(built.get_submodule(owner), leaf, module.get_base_layer())
    return built
