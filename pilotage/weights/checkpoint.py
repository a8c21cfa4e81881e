"""A safetensors checkpoint on disk, read a part at a time.

Files are read with positioned reads rather than mapped: a rank that takes every second column of a matrix would
otherwise keep all of its pages resident.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pilotage.core import store
from pilotage.core.errors import BadInput, WeightError
from pilotage.weights.lazy import LazyTensor, SafetensorsFile

if TYPE_CHECKING:
    from torch import Tensor, nn

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class LoadResult:
    """What one rank loaded.

    Attributes:
        state_dict: parameter name -> this rank's tensor, on the device.
        missing_keys: parameters of the model that no mapping names.
        unexpected_keys: checkpoint tensors that no mapping used.
    """

    state_dict: dict[str, Tensor]
    missing_keys: list[str] = field(default_factory=list)
    unexpected_keys: list[str] = field(default_factory=list)


class SafetensorsCheckpoint:
    """The safetensors files of a model directory, as one mapping of lazy tensors.

    Opening reads the headers only, and checks that every file is whole and every tensor is where the index says.

    Args:
        path: the model's directory, or one .safetensors file, or a hub id whose files are in the local hub cache; the
            network is not asked.
        cache_dir: the hub cache in which an id is looked up, None for Hugging Face's own. A directory is read in place.

    Raises:
        BadInput: no such directory, no safetensors in it, a missing or truncated file, a header that contradicts it.
        WeightError: a tensor that the index places in a file that lacks it, or that two files hold.
    """

    def __init__(self, path: str | Path, cache_dir: str | Path | None = None) -> None:
        if cache_dir is not None and Path(cache_dir).is_file():
            raise BadInput("cache_dir is a file", where=str(cache_dir), do="name a directory, or None")
        self.path = _located(path, cache_dir)
        self.tensors: dict[str, LazyTensor] = {}
        index = self.path / _INDEX
        if self.path.is_file():
            self._add(SafetensorsFile(self.path))
        elif not self.path.is_dir():
            raise BadInput("no such checkpoint directory", where=str(self.path), do="check the path")
        elif (self.path / _SINGLE).is_file():
            # transformers prefers the single file too: the reference must read the same weights.
            self._add(SafetensorsFile(self.path / _SINGLE))
        elif index.is_file():
            self._add_indexed(index)
        else:
            self._add_numbered()

    def keys(self) -> list[str]:
        """Return the names of all tensors, in the order of the files."""
        return list(self.tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> LazyTensor:
        """Return the lazy tensor `name`.

        Raises:
            WeightError: the checkpoint has no such tensor.
        """
        try:
            return self.tensors[name]
        except KeyError:
            raise WeightError("the checkpoint has no such tensor", where=f"{name} in {self.path}") from None

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data read so far."""
        return sum(file.bytes_read for file in {id(t.file): t.file for t in self.tensors.values()}.values())

    def load_sharded_pipelined(
        self,
        rank: int,
        world_size: int,
        model: nn.Module,
        mappings: Mapping[str, str | Sequence[str]],
        device: torch.device | str,
        *,
        strict: bool = True,
    ) -> LoadResult:
        """Load one rank's share of every mapped parameter, reading ahead while the previous one is converted.

        Args:
            rank: this rank in its group of `world_size`.
            world_size: ranks in the group.
            model: its parameters (often on the meta device) give the loaders, the shapes and the dtypes.
            mappings: parameter name -> checkpoint key, or list of keys for a loader that takes several.
            device: where the tensors go.
            strict: raise for parameters without a mapping and checkpoint tensors that no mapping uses; False only
                lists them in the result.

        Raises:
            WeightError: an unknown parameter or key, a shape or dtype that does not fit, or what strict refuses.
        """
        from pilotage.weights.reading import read_shares

        if not 0 <= rank < world_size:
            raise WeightError(f"rank {rank} of {world_size}", where="load_sharded_pipelined")
        parameters = dict(model.named_parameters(remove_duplicate=False))
        keys = {name: [key] if isinstance(key, str) else list(key) for name, key in mappings.items()}
        unknown = [name for name in keys if name not in parameters]
        if unknown:
            raise WeightError("the model has no such parameter", where=unknown[0], do="correct the mapping")
        used = {key for names in keys.values() for key in names}
        missing = [name for name in parameters if name not in keys]
        unexpected = [key for key in self.tensors if key not in used]
        if strict and (missing or unexpected):
            name = (missing or unexpected)[0]
            text = "no mapping writes this parameter" if missing else "no mapping uses this checkpoint tensor"
            raise WeightError(text, where=name, do="add it to the mappings, or pass strict=False and check the result")
        sources = {name: [self[key] for key in names] for name, names in keys.items()}
        wanted = {name: parameters[name] for name in keys}
        state = dict(read_shares(wanted, sources, rank=rank, device=torch.device(device)))
        return LoadResult(state, missing, unexpected)

    def _add(self, file: SafetensorsFile) -> None:
        for name, tensor in file.tensors.items():
            if name in self.tensors:
                raise WeightError(
                    f"two files hold this tensor: {self.tensors[name].file.path.name} and {file.path.name}",
                    where=name,
                    do=f"remove one, or add {_INDEX}",
                )
            self.tensors[name] = tensor

    def _add_indexed(self, index: Path) -> None:
        content = store.read_json(index)
        places = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise BadInput("has no weight_map of tensor to file", where=str(index), do="fetch the index again")
        for file_name in dict.fromkeys(places.values()):
            path = self.path / file_name
            if path.parent != self.path:
                raise BadInput(f"places tensors outside its directory ({file_name})", where=str(index))
            if not path.is_file():
                lost = [name for name, place in places.items() if place == file_name]
                raise BadInput(
                    f"a shard is missing; it should hold {lost[0]} and {len(lost) - 1} more",
                    where=str(path),
                    do="fetch it",
                )
            self._add(SafetensorsFile(path))
        for name, file_name in places.items():
            if name not in self.tensors or self.tensors[name].file.path.name != file_name:
                raise WeightError(
                    f"the index places it in {file_name}, which lacks it", where=name, do="fetch that file"
                )
        for name, tensor in self.tensors.items():
            if name not in places:
                raise WeightError(
                    f"{tensor.file.path.name} holds it, {_INDEX} does not", where=name, do="fetch the index again"
                )

    def _add_numbered(self) -> None:
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise BadInput("this directory holds no *.safetensors", where=str(self.path), do="name a checkpoint")
        for path in files:
            match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.safetensors", path.name)
            if match and len([f for f in files if f.name.startswith(match[1] + "-")]) != int(match[3]):
                raise BadInput(
                    f"a shard is missing: {int(match[3])} should be there", where=str(path), do="fetch the others"
                )
            self._add(SafetensorsFile(path))


def _located(path: str | Path, cache_dir: str | Path | None) -> Path:
    """Return a local path as it is, and for a hub id the newest snapshot in the cache, if there is one."""
    if Path(path).exists() or not _HUB_ID.fullmatch(str(path)):
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(path), cache_dir=cache_dir, local_files_only=True))
    except LocalEntryNotFoundError:
        return Path(path)
