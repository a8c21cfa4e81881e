"""Reference captures in files: as the tensor replacement document writes them, as safetensors, or a capture directory.

vLLM hashes its configuration as JSON and hands it to other processes, so tensors given in memory are spooled to a file
and the configuration holds its path.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from pilotage.core import store
from pilotage.core.errors import BadInput, ConfigError
from pilotage.probe.captures import MANIFEST, Captures, write_safetensors
from pilotage.probe.replacement import TensorReplacer

_PICKLED = (".pt", ".pth", ".bin")
Convert = Callable[[str, Tensor], Tensor]


class TensorReplacementConfig(dict[str, Any]):
    """What `additional_config` takes as `tensor_replacement`: a dictionary of JSON values.

    Args:
        tensors: one dictionary a prompt, module name -> steps; written to a file that goes with this process.
        prompt_token_ids: token ids of each prompt.
        tensors_path: file or capture directory instead of `tensors`.
        reference_captures_path: another name of `tensors_path`.
        prompt_token_ids_path: file instead of `prompt_token_ids`; a capture directory knows them itself.
        sites: patterns of what is replaced; None for everything that has a reference.

    Raises:
        ConfigError: tensors are given twice, or not at all.
    """

    def __init__(
        self,
        tensors: Sequence[Mapping[str, Sequence[Tensor] | Tensor]] | None = None,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        *,
        tensors_path: str | Path | None = None,
        reference_captures_path: str | Path | None = None,
        prompt_token_ids_path: str | Path | None = None,
        sites: Sequence[str] | None = None,
    ) -> None:
        path = tensors_path or reference_captures_path
        if (tensors is None) == (path is None):
            raise ConfigError("give either tensors or tensors_path", where="tensor_replacement")
        values: dict[str, Any] = {}
        if tensors is not None:
            if prompt_token_ids is None and prompt_token_ids_path is None:
                raise ConfigError("tensors need prompt_token_ids", where="tensor_replacement")
            directory = Path(tempfile.mkdtemp(prefix="pilotage-reference-"))
            atexit.register(shutil.rmtree, directory, ignore_errors=True)
            path = directory / "tensors.safetensors"
            save_reference(path, tensors, prompt_token_ids or [])
        values["tensors_path"] = str(path)
        if prompt_token_ids is not None and tensors is None:
            raise ConfigError("with tensors_path give prompt_token_ids_path", where="tensor_replacement")
        if prompt_token_ids_path is not None:
            values["prompt_token_ids_path"] = str(prompt_token_ids_path)
        if sites is not None:
            values["sites"] = list(sites)
        super().__init__(values)

    @property
    def tensors(self) -> list[dict[str, list[Tensor]]]:
        """The reference captures, read from their file."""
        return read_tensors(Path(self["tensors_path"]))

    @property
    def prompt_token_ids(self) -> list[list[int]]:
        """The prompts, read from their file."""
        given = self.get("prompt_token_ids_path")
        return read_prompts(Path(self["tensors_path"]), Path(given) if given else None)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def save_reference(
    path: str | Path,
    reference_captures: Sequence[Mapping[str, Sequence[Tensor] | Tensor]],
    prompt_token_ids: Sequence[Sequence[int]],
) -> None:
    """Write reference captures and their prompts to one safetensors file."""
    tensors: dict[str, Tensor] = {}
    for number, capture in enumerate(reference_captures):
        for module, steps in capture.items():
            for step, value in enumerate([steps] if isinstance(steps, Tensor) else steps):
                tensors[f"{number}/{module}/{step}"] = value
    prompts = json.dumps([[int(token) for token in ids] for ids in prompt_token_ids])
    write_safetensors(Path(path), tensors, {"prompt_token_ids": prompts, "prompts": str(len(reference_captures))})


def load_replacer(
    tensors_path: str | Path,
    prompt_token_ids_path: str | Path | None = None,
    *,
    sites: Sequence[str] | None = None,
    convert: Convert | None = None,
) -> TensorReplacer:
    """Read a reference from disk.

    Args:
        tensors_path: a capture directory, a `.safetensors` file of `save_reference`, or a `.pt` file of the document.
        prompt_token_ids_path: `.pt` or `.json`; needed for `.pt` tensors only.
        sites: names to read; None for all.
        convert: called with (site, rows) as they are read.

    Raises:
        BadInput: a file is missing, unreadable or of another form.
    """
    path = Path(tensors_path)
    if path.is_dir():
        if prompt_token_ids_path is not None:
            raise BadInput(
                "a capture directory knows its prompts", where=str(path), do="leave prompt_token_ids_path out"
            )
        return TensorReplacer.from_captures(Captures.open(path), sites=sites, convert=convert)
    captures = read_tensors(path)
    if sites is not None:
        captures = [{name: steps for name, steps in capture.items() if name in sites} for capture in captures]
    prompts = read_prompts(path, Path(prompt_token_ids_path) if prompt_token_ids_path else None)
    return TensorReplacer(captures, prompt_token_ids=prompts, convert=convert)


def names_in(path: str | Path) -> list[str]:
    """Return the names that a reference on disk has, in its order."""
    path = Path(path)
    if path.is_dir():
        return list(Captures.open(path).sites)
    if path.suffix == ".safetensors":
        with _opened(path) as file:
            return list(dict.fromkeys(key.split("/", 1)[1].rsplit("/", 1)[0] for key in file.keys()))  # noqa: SIM118
    return list(dict.fromkeys(name for capture in read_tensors(path) for name in capture))


def read_tensors(path: Path) -> list[dict[str, list[Tensor]]]:
    """Read reference captures from a file.

    Raises:
        BadInput: it is missing, or not what `save_reference` or the document's `torch.save` writes.
    """
    if path.is_dir() and (path / MANIFEST).exists():
        raise BadInput("is a capture directory, which has no steps", where=str(path), do="open it with Captures")
    if path.suffix == ".safetensors":
        captures: list[dict[str, list[Tensor]]] = []
        with _opened(path) as file:
            keys = sorted(file.keys(), key=_key)
            captures = [{} for _ in range(int((file.metadata() or {}).get("prompts", 0)))]
            for key in keys:
                number, module, _ = _key(key)
                captures[number].setdefault(module, []).append(file.get_tensor(key))
        return captures
    found = _unpickled(path)
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise BadInput("holds no list of dictionaries, one a prompt", where=str(path))
    return [
        {str(name): [steps] if isinstance(steps, Tensor) else list(steps) for name, steps in item.items()}
        for item in found
    ]


def _key(key: str) -> tuple[int, str, int]:
    number, rest = key.split("/", 1)
    module, step = rest.rsplit("/", 1)
    return int(number), module, int(step)


def read_prompts(tensors_path: Path, path: Path | None) -> list[list[int]]:
    """Read the prompts of a reference: from their own file, or from the tensors' where that holds them."""
    if path is None:
        if tensors_path.suffix == ".safetensors":
            with _opened(tensors_path) as file:
                found = json.loads((file.metadata() or {}).get("prompt_token_ids", "[]"))
            if found:
                return [list(ids) for ids in found]
        raise BadInput("says nothing of the prompts", where=str(tensors_path), do="give prompt_token_ids_path as well")
    found = store.read_json(path) if path.suffix == ".json" else _unpickled(path)
    if isinstance(found, Tensor):
        found = found.tolist()
    prompts = [ids.flatten().tolist() if isinstance(ids, Tensor) else ids for ids in found]
    # The document's prompts may keep the batch dimension of a tokenizer.
    prompts = [ids[0] if len(ids) == 1 and isinstance(ids[0], list) else ids for ids in prompts]
    if not all(isinstance(token, int) for ids in prompts for token in ids):
        raise BadInput("holds no lists of token ids", where=str(path))
    return [list(ids) for ids in prompts]


def _opened(path: Path) -> Any:
    if not path.is_file():
        raise BadInput("no such file", where=str(path))
    try:
        return safe_open(path, framework="pt")
    except Exception as error:
        raise BadInput(f"is no safetensors file ({error})", where=str(path)) from error


def _unpickled(path: Path) -> Any:
    if not path.is_file():
        raise BadInput("no such file", where=str(path))
    if path.suffix not in _PICKLED:
        raise BadInput("is neither .safetensors nor .pt nor a capture directory", where=str(path))
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever is in it, it is not only tensors
        raise BadInput(
            f"cannot be read as tensors and lists alone ({str(error).splitlines()[0][:120]})",
            where=str(path),
            do="save it with torch.save as lists, dictionaries and tensors, or as safetensors",
        ) from error
