"""Checkpoints of a run: weights as Hugging Face safetensors, the rest beside them, whole or not there.

    out/checkpoints/step-00000010/
        model.safetensors    whole tensors under Hugging Face's names; config and tokenizer beside them
        optimizer/           first and second moments, by torch.distributed.checkpoint
        state.json           step, and what the run must be to go on from here

Every process writes its own share into a directory of a temporary name; one process makes whole files of the weights'
shares and renames the directory when everything is on disk. Reading divides again, over whatever mesh there is then.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

from pilotage.core import store
from pilotage.core.errors import WeightError
from pilotage.training.engine import Engine, local
from pilotage.training.mesh import Mesh

_NAME = re.compile(r"step-(\d{8})")
STATE, OPTIMIZER = "state.json", "optimizer"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Shards of weights that are larger than this are divided over several files, as Hugging Face does.
FILE_BYTES = 5 << 30


def directory(out: Path, step: int) -> Path:
    """Return where the checkpoint after `step` steps is."""
    return out / "checkpoints" / f"step-{step:08d}"


def whole(out: Path) -> list[Path]:
    """List the checkpoints that are whole, oldest first; a directory has its final name only when it is."""
    folder = out / "checkpoints"
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and (path / STATE).is_file())


def sweep(out: Path) -> None:
    """Remove what interrupted writes left behind."""
    folder = out / "checkpoints"
    for leftover in folder.glob(".step-*") if folder.is_dir() else ():
        shutil.rmtree(leftover, ignore_errors=True)


def save(
    path: Path,
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    *,
    write_others: Callable[[Path], None],
    rename: Callable[[str], str] = lambda name: name,
    file: str = "model",
) -> None:
    """Write a checkpoint; every process calls this.

    Args:
        path: its final name.
        engine, optimizer: what is written.
        state: goes to state.json.
        write_others: puts config and tokenizer into a directory; called in one process.
        rename: parameter name -> name in the file.
        file: name of the weights' file without its suffix.

    Raises:
        StorageError: the disk is full or the place may not be written; no directory of the final name is there then.
    """
    mesh, part = engine.mesh, path.parent / f".{path.name}.part"
    with store.as_storage_error(path):
        if mesh.first:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        _wait(mesh)
        weights = {rename(name): value for name, value in _as_stored(engine, _owned(engine)).items()}
        names = _all_names(weights, mesh)
        _save(
            weights,
            HuggingFaceStorageWriter(
                str(part), fqn_to_index_mapping=names, save_distributed=True, enable_consolidation=True
            ),
        )
        _save(_moments(engine, optimizer, saving=True), FileSystemWriter(part / OPTIMIZER, sync_files=True))
        if mesh.first:
            _as_hugging_face(part, file)
            write_others(part)
            (part / STATE).write_text(json.dumps(dict(state), indent=2) + "\n")
            _to_disk(part)
            if path.exists():
                shutil.rmtree(path)
            part.rename(path)
            _to_disk(path.parent, deep=False)
        _wait(mesh)


def load(
    path: Path,
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    *,
    rename: Callable[[str], str] = lambda name: name,
) -> dict[str, Any]:
    """Read a checkpoint into a model and an optimizer, in place, whatever mesh wrote it; returns its state.

    Raises:
        WeightError: it lacks a tensor.
    """
    _load_weights(path, engine, rename)
    _make_moments(engine, optimizer)
    _load(_moments(engine, optimizer, saving=False), FileSystemReader(path / OPTIMIZER), path / OPTIMIZER)
    found: dict[str, Any] = store.read_json(path / STATE)
    return found


def _load_weights(path: Path, engine: Engine, rename: Callable[[str], str]) -> None:
    own = {_name(engine, name): value.detach() for name, value in engine.parameters().items()}
    stored = _as_stored(engine, own)
    # Most of these are the parameters' own memory; what is not is put there after reading.
    _load({rename(name): value for name, value in stored.items()}, HuggingFaceStorageReader(str(path)), path)
    adapter = getattr(engine.model, "state_dict_adapter", None)
    if adapter is not None:
        for name, value in adapter.from_hf(stored).items():
            if name in own:
                local(own[name]).copy_(local(value))


def _as_stored(engine: Engine, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what a checkpoint calls these parameters; experts, which some keep one by one, are a tensor each then."""
    adapter = getattr(engine.model, "state_dict_adapter", None)
    return dict(own) if adapter is None else dict(adapter.to_hf(own))


def prune(out: Path, keep: int) -> None:
    """Remove all but the last `keep` checkpoints."""
    for path in whole(out)[:-keep]:
        doomed = path.with_name(f".{path.name}.old")
        path.rename(doomed)  # so that half of it is never taken for a checkpoint
        shutil.rmtree(doomed, ignore_errors=True)


def _owned(engine: Engine) -> dict[str, Tensor]:
    """Return what this process writes; of a tied head on another stage the embedding's stage writes the one copy."""
    return {
        name: value.detach()
        for name, value in engine.parameters().items()
        if not (engine.tied and name == _HEAD and engine.mesh.pp > 1)
    }


def _name(engine: Engine, name: str) -> str:
    return _EMBEDDING if engine.tied and name == _HEAD else name


def _moments(engine: Engine, optimizer: torch.optim.Optimizer, *, saving: bool) -> dict[str, Tensor]:
    owned = _owned(engine)
    found = {}
    for name, parameter in engine.parameters().items():
        if saving and name not in owned:
            continue
        for kind, value in optimizer.state[parameter].items():
            found[f"{_name(engine, name)}.{kind}"] = value
    return found


def _make_moments(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer make its state, without a step."""
    for parameter in engine.parameters().values():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }


def _all_names(weights: Mapping[str, Tensor], mesh: Mesh) -> dict[str, int]:
    """Say into which file each tensor of all processes goes."""
    sizes = {name: value.numel() * value.element_size() for name, value in weights.items()}
    if mesh.devices is not None:
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, sizes)
        sizes = {name: size for part in parts for name, size in part.items()}
    index, filled, found = 1, 0, {}
    for name, size in sizes.items():
        if filled and filled + size > FILE_BYTES:
            index, filled = index + 1, 0
        found[name], filled = index, filled + size
    return found


def _save(values: Mapping[str, Tensor], writer: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process, and of deprecated storage inside torch
        dcp.save(dict(values), storage_writer=writer)


def _load(values: dict[str, Tensor], reader: Any, path: Path) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(values, storage_reader=reader)
    except (RuntimeError, dcp.api.CheckpointException) as error:
        text = str(error)
        missing = re.search(r"Missing key in checkpoint state_dict: (\S+?)\.?\s", text + " ")
        raise WeightError(
            f"has no {missing.group(1)}" if missing else f"cannot be read ({text.strip().splitlines()[-1]})",
            where=str(path),
            do="remove this checkpoint to go on from the one before it",
        ) from error


def _as_hugging_face(part: Path, file: str) -> None:
    """Leave the whole files alone, under the names that transformers looks for."""
    shutil.rmtree(part / "sharded")
    files = sorted(part.glob("model-*.safetensors"))
    index = part / "model.safetensors.index.json"
    if len(files) == 1:
        index.unlink(missing_ok=True)
        files[0].rename(part / f"{file}.safetensors")


def _to_disk(path: Path, *, deep: bool = True) -> None:
    """Wait until files are on disk: a rename must not arrive before what it names."""
    for each in [*(path.rglob("*") if deep else ()), path]:
        handle = os.open(each, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _wait(mesh: Mesh) -> None:
    if mesh.devices is not None:
        dist.barrier()
