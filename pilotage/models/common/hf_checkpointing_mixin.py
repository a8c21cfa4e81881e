"""Loading and saving of training models as Hugging Face checkpoints, strict and whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedConfig

from pilotage.arch import source
from pilotage.core import store
from pilotage.core.errors import Unsupported, WeightError
from pilotage.weights import load_into


class HFCheckpointingMixin:
    """Mixed in before a `PreTrainedModel`: every weight comes from the checkpoint, and a save is whole or not there."""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *model_args: Any, strict: bool = True, **kwargs: Any
    ) -> Any:
        """Load a Hugging Face checkpoint.

        Args:
            pretrained_model_name_or_path: its directory, or a name that Hugging Face resolves.
            model_args, kwargs: of `PreTrainedModel.from_pretrained`, and `backend`, a `BackendConfig`.
            strict: refuse a checkpoint that lacks a weight of the model, or has one that the model does not know.
                False: take what fits and initialise the rest, as Hugging Face does.

        Returns:
            The model; with `output_loading_info` what Hugging Face reports beside it.

        Raises:
            WeightError: what strict refuses, by name.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        parent: Any = super()
        if not _same_names(cls, pretrained_model_name_or_path, kwargs):
            return _load_mapped(cls, pretrained_model_name_or_path, kwargs, wants_info)
        model, info = parent.from_pretrained(
            pretrained_model_name_or_path, *model_args, output_loading_info=True, **kwargs
        )
        model.freeze()
        if strict:
            new = model.new_parameters()
            where = f"{pretrained_model_name_or_path}"
            _refuse("the checkpoint has no such tensor", (n for n in info["missing_keys"] if n not in new), where)
            _refuse("has another shape in the checkpoint", (entry[0] for entry in info["mismatched_keys"]), where)
            _refuse("the model has no such parameter", info["unexpected_keys"], where)
        return (model, info) if wants_info else model

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Write config and weights as a Hugging Face checkpoint; what else is in the directory stays.

        Sharded parameters (DTensors) are gathered: every rank calls this, and rank 0 writes.

        Args:
            save_directory: is made or replaced when all is written, so that it never holds half a checkpoint.
            is_main_process: whether this process writes.
            state_dict: what is written; None for the model's own.
            args, kwargs: of `PreTrainedModel.save_pretrained`.

        Raises:
            StorageError: the disk is full or the place may not be written.
        """
        parent: Any = super()
        state = self.state_dict() if state_dict is None else state_dict  # type: ignore[attr-defined]
        adapter = getattr(self, "state_dict_adapter", None)
        sharded = any(isinstance(tensor, DTensor) for tensor in state.values())
        if sharded:
            state = {name: _gathered(tensor) for name, tensor in state.items()}
        if adapter is not None:
            state = adapter.to_hf(state)
        if is_main_process and not (sharded and torch.distributed.get_rank()):
            path = Path(save_directory)
            with store.new_directory(path) as temporary:
                for kept in _others(path):
                    shutil.copy2(kept, temporary / kept.name)
                parent.save_pretrained(temporary, True, state, *args, **kwargs)
        if sharded:
            torch.distributed.barrier()


def _same_names(cls: Any, path: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the model's parameters are the checkpoint's tensors; settles the config on the way."""
    if path is None:
        return True  # weights are given as they are
    config = kwargs.get("config")
    if not isinstance(config, PreTrainedConfig):
        known = {
            name: kwargs[name] for name in ("revision", "cache_dir", "token", "local_files_only") if name in kwargs
        }
        config = cls.config_class.from_pretrained(config or path, **known)
    return bool(cls.map_of(config, kwargs.get("backend")).is_identity)


def _load_mapped(cls: Any, path: Any, kwargs: dict[str, Any], wants_info: bool) -> Any:
    """Load through the model's WeightMap, tensor by tensor, as serving does."""
    directory = source.resolve(str(path))
    config: Any = kwargs.pop("config", None)
    dtype: Any = kwargs.pop("dtype", kwargs.pop("torch_dtype", None))
    backend, attention = kwargs.pop("backend", None), kwargs.pop("attn_implementation", None)
    config = config if isinstance(config, PreTrainedConfig) else cls.config_class.from_pretrained(directory)
    if kwargs:
        raise Unsupported(
            "this architecture is loaded through its weight map, which knows config, dtype, backend, "
            "attn_implementation and output_loading_info",
            where=f"from_pretrained, {sorted(kwargs)[0]}",
            do="leave it out",
        )
    dtype = config.dtype if dtype in (None, "auto") else getattr(torch, dtype) if isinstance(dtype, str) else dtype
    options = {} if attention is None else {"attn_implementation": attention}
    with torch.device("meta"):
        model = cls._from_config(config, backend=backend, dtype=dtype, **options)
    load_into(model, directory, cls.map_of(config, backend), dtype=dtype)
    model.tie_weights()
    model.freeze()
    model.eval()
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    info: dict[str, Any] = {name: set() for name in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    return (model, info) if wants_info else model


def _others(path: Path) -> list[Path]:
    """List the files of an older save that are no weights."""
    if not path.is_dir():
        return []
    return [file for file in path.iterdir() if file.is_file() and ".safetensors" not in file.name]


def _gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _refuse(what: str, names: Iterable[str], where: str) -> None:
    found = sorted(names)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise WeightError(f"{what}{more}", where=f"{found[0]}, {where}", do="compare the checkpoint with the model")
