"""Captured tensors on disk: every row addressed by request, position and site.

A directory holds `manifest.json` and one safetensors file per step (`000000.safetensors`, ...). A step's file has the
sites' rows and, beside them, which request, position and token each row belongs to, so it says everything about
itself: a run that was interrupted leaves whole steps, and a later run adds to them. Nothing is read until it is asked
for, and writing never holds more than the step at hand.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from safetensors import safe_open
from torch import Tensor

from pilotage.core import sites, store
from pilotage.core.errors import BadInput
from pilotage.core.nouns import TensorKey

FORMAT = "pilotage captures 1"
MANIFEST = "manifest.json"
# Rows of the index; a site's name never starts with "@".
_REQUEST, _POSITION, _TOKEN, _SAMPLED = "@request", "@position", "@token", "@sampled"
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors without copying them, whole or not at all; the order of `tensors` is kept in the file."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        length = tensor.numel() * tensor.element_size()
        dims = list(tensor.shape)
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": dims, "data_offsets": [offset, offset + length]}
        offset += length
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    with store.as_storage_error(path):
        try:
            with open(temporary, "wb") as out:
                out.write(len(encoded).to_bytes(8, "little"))
                out.write(encoded)
                for tensor in tensors.values():
                    if tensor.numel():
                        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                        out.write(flat.numpy().data)
            # Renamed but not synced: a power cut may lose the last steps, which are then computed again. A sync a step
            # would cost more than the step.
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


class CaptureWriter:
    """Writes captures step by step; usable as a context manager.

    A directory that has captures of the same arm already is continued: its requests and steps stay.

    Args:
        directory: created if missing.
        arm: what produces the rows, e.g. "target", "hf_fp32".
        notes: JSON values kept in the manifest.

    Raises:
        BadInput: the directory holds captures of another arm, or something else.
        StorageError: it cannot be written.
    """

    def __init__(self, directory: str | Path, *, arm: str, notes: Mapping[str, Any] | None = None) -> None:
        self.directory, self.arm, self.notes = Path(directory), arm, dict(notes or {})
        self.sites: dict[str, dict[str, Any]] = {}
        self._numbers: dict[str, int] = {}
        self._prompts: list[list[int]] = []
        self._unwritten: list[int] = []
        self._next = 0
        if (self.directory / MANIFEST).exists():
            self._continue(Captures.open(self.directory))
        else:
            with store.as_storage_error(self.directory):
                self.directory.mkdir(parents=True, exist_ok=True)
            if any(self.directory.glob("*.safetensors")):
                raise BadInput("holds files but no manifest", where=str(self.directory), do="name an empty directory")
        self._write_manifest(complete=False)

    def _continue(self, before: Captures) -> None:
        if before.arm != self.arm:
            raise BadInput(
                f"holds captures of the arm {before.arm!r}, not {self.arm!r}",
                where=str(self.directory),
                do="name another directory",
            )
        for name, prompt in before.requests.items():
            self._numbers[name] = len(self._prompts)
            self._prompts.append(prompt)
        self.sites = {name: dict(facts) for name, facts in before.sites.items()}
        self.notes = {**before.notes, **self.notes}
        self._next = before.next_step

    def request(self, name: str, prompt_token_ids: Sequence[int]) -> int:
        """Make a request known; again with the same prompt does nothing.

        Args:
            name: the `request` of its keys.
            prompt_token_ids: its prompt, by which captures of other arms are matched.

        Returns:
            Its number in the files' index.

        Raises:
            BadInput: the name is taken by another prompt.
        """
        prompt = [int(token) for token in prompt_token_ids]
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._prompts)
            self._prompts.append(prompt)
            self._unwritten.append(number)
        elif self._prompts[number] != prompt:
            raise BadInput(
                f"request {name!r} was captured with another prompt",
                where=str(self.directory),
                do="name another directory, or other requests",
            )
        return number

    def add(
        self,
        tensors: Mapping[str, Tensor],
        *,
        requests: Sequence[str],
        positions: Sequence[int] | Tensor,
        tokens: Sequence[int] | Tensor | None = None,
        sampled: Sequence[int] | Tensor | None = None,
    ) -> Path:
        """Write one step.

        Args:
            tensors: site -> [rows, ...] on any device; a site that only computes the sampled rows has
                [len(sampled), ...].
            requests: name of the request of each row; each made known before.
            positions: absolute position of each row in its request.
            tokens: input token of each row.
            sampled: rows, ascending, whose logits were computed.

        Returns:
            The file.

        Raises:
            BadInput: a tensor whose rows are neither all nor the sampled ones.
        """
        count = len(requests)
        index = {
            _REQUEST: torch.tensor([self._numbers[name] for name in requests], dtype=torch.int32),
            _POSITION: torch.as_tensor(positions, dtype=torch.int32).cpu(),
        }
        if tokens is not None:
            index[_TOKEN] = torch.as_tensor(tokens, dtype=torch.int32).cpu()
        if sampled is not None:
            index[_SAMPLED] = torch.as_tensor(sampled, dtype=torch.int32).cpu()
        num_sampled = len(index[_SAMPLED]) if sampled is not None else -1
        new_site = False
        for name, tensor in tensors.items():
            if tensor.shape[0] not in (count, num_sampled):
                raise BadInput(f"{tensor.shape[0]} rows for a step of {count}", where=name)
            if name not in self.sites:
                dtype = str(tensor.dtype).removeprefix("torch.")
                self.sites[name] = {"shape": list(tensor.shape[1:]), "dtype": dtype}
                new_site = True
        new = [(self._name(number), self._prompts[number]) for number in self._unwritten]
        path = self.directory / f"{self._next:06d}.safetensors"
        write_safetensors(path, {**index, **tensors}, {"requests": json.dumps(new)} if new else None)
        self._next += 1
        self._unwritten.clear()
        if new_site:
            self._write_manifest(complete=False)
        return path

    def _name(self, number: int) -> str:
        return next(name for name, other in self._numbers.items() if other == number)

    def _write_manifest(self, *, complete: bool) -> None:
        manifest = {
            "format": FORMAT,
            "arm": self.arm,
            "complete": complete,
            "sites": self.sites,
            "requests": [
                {"name": name, "prompt_token_ids": self._prompts[number]}
                for name, number in self._numbers.items()
                if number not in self._unwritten or complete
            ],
            "notes": self.notes,
        }
        store.write_json(self.directory / MANIFEST, manifest)

    @property
    def num_steps(self) -> int:
        """Steps written so far, those of earlier runs included."""
        return self._next

    def close(self, **notes: Any) -> None:
        """Mark the captures complete; `notes` are added to the manifest's."""
        self.notes.update(notes)
        self._write_manifest(complete=True)
        self._unwritten.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()


class _Step(NamedTuple):
    """One file: what it holds and the index of its rows."""

    path: Path
    sites: frozenset[str]
    request: Tensor
    position: Tensor
    token: Tensor | None
    sampled: Tensor | None


class Captures:
    """Captures that were written, read back when asked for.

    Attributes:
        directory: where they are.
        arm: what produced them.
        complete: whether the writer was closed; if not, the steps that are there are whole all the same.
        requests: name -> prompt token ids, in order of arrival.
        sites: name -> {"shape", "dtype"} of one row, in the order of the model.
        notes: what the writer noted.
    """

    def __init__(self, directory: Path, manifest: Mapping[str, Any]) -> None:
        self.directory = directory
        self.arm: str = manifest["arm"]
        self.complete: bool = manifest["complete"]
        self.sites: dict[str, dict[str, Any]] = dict(manifest["sites"])
        self.notes: dict[str, Any] = dict(manifest["notes"])
        self.requests: dict[str, list[int]] = {
            item["name"]: list(item["prompt_token_ids"]) for item in manifest["requests"]
        }
        self._steps: list[_Step] = []
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                names = set(file.keys())
                for name, prompt in json.loads((file.metadata() or {}).get("requests", "[]")):
                    self.requests.setdefault(name, list(prompt))
                self._steps.append(
                    _Step(
                        path=path,
                        sites=frozenset(name for name in names if not name.startswith("@")),
                        request=file.get_tensor(_REQUEST),
                        position=file.get_tensor(_POSITION).long(),
                        token=file.get_tensor(_TOKEN) if _TOKEN in names else None,
                        sampled=file.get_tensor(_SAMPLED).long() if _SAMPLED in names else None,
                    )
                )
        self._number = {name: number for number, name in enumerate(self.requests)}

    @classmethod
    def open(cls, directory: str | Path) -> Captures:
        """Open a directory of captures; only its index is read.

        Raises:
            BadInput: it holds no captures.
        """
        path = Path(directory)
        manifest = store.read_json(path / MANIFEST)
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise BadInput("holds no captures", where=str(path), do="name a directory written by a capture")
        return cls(path, manifest)

    @property
    def next_step(self) -> int:
        """Number of the first file that is not there yet."""
        return int(self._steps[-1].path.stem) + 1 if self._steps else 0

    def __len__(self) -> int:
        """Number of steps."""
        return len(self._steps)

    def find(self, prompt_token_ids: Sequence[int]) -> list[str]:
        """Return the requests with exactly this prompt, in order of arrival."""
        prompt = [int(token) for token in prompt_token_ids]
        return [name for name, other in self.requests.items() if other == prompt]

    def tokens(self, request: str) -> tuple[Tensor, Tensor]:
        """Return the positions that were computed and their input tokens, int64, ascending.

        Raises:
            BadInput: an unknown request, or the arm noted no tokens.
        """
        number = self._request(request)
        positions, tokens = [], []
        for step in self._steps:
            rows = step.request == number
            if not rows.any():
                continue
            if step.token is None:
                raise BadInput("no tokens were noted", where=str(step.path))
            positions.append(step.position[rows])
            tokens.append(step.token[rows].long())
        return _last_of_each(positions, tokens, torch.empty(0, dtype=torch.int64))

    def get(self, request: str, site: str) -> tuple[Tensor, Tensor]:
        """Read the rows of a request at a site.

        A position that was computed twice (preemption) has the later row. Positions that were never computed, because
        a prefix was found in the cache, are absent.

        Args:
            request: its name, see `requests`.
            site: e.g. "model.layers.0.mlp"; `.output` may be written out.

        Returns:
            positions [rows] int64, ascending, and the rows [rows, ...].

        Raises:
            BadInput: the request or site is unknown.
        """
        number, site = self._request(request), self._site(site)
        positions: list[Tensor] = []
        found: list[Tensor] = []
        for step in self._steps:
            if site not in step.sites or not (step.request == number).any():
                continue
            with safe_open(step.path, framework="pt") as file:
                rows = file.get_slice(site)
                owner, position = step.request, step.position
                if rows.get_shape()[0] != len(owner):
                    assert step.sampled is not None
                    owner, position = owner[step.sampled], position[step.sampled]
                wanted = (owner == number).nonzero()[:, 0]
                if not len(wanted):
                    continue
                first, last = int(wanted[0]), int(wanted[-1]) + 1
                part = rows[first:last]
                if last - first != len(wanted):
                    part = part[wanted - first]
            positions.append(position[wanted])
            found.append(part)
        facts = self.sites[site]
        return _last_of_each(positions, found, torch.empty((0, *facts["shape"]), dtype=getattr(torch, facts["dtype"])))

    def row(self, key: TensorKey) -> Tensor:
        """Read one row.

        Raises:
            BadInput: it is not there.
        """
        site = str(sites.Site(key.module, key.site))
        positions, rows = self.get(key.request, site)
        where = (positions == key.position).nonzero()[:, 0]
        if key.arm != self.arm or not len(where):
            raise BadInput("no such row", where=f"{self.directory}, {key}")
        return rows[where[0]]

    def keys(self, *, sites_of: Iterable[str] | None = None) -> Iterator[TensorKey]:
        """Yield the key of every row, request by request; of the sites `sites_of`, or of all."""
        names = list(self.sites) if sites_of is None else [self._site(name) for name in sites_of]
        for request in self.requests:
            for name in names:
                place = sites.parse(name)
                for position in self.positions(request, name).tolist():
                    yield TensorKey(self.arm, request, position, place.module, place.site)

    def positions(self, request: str, site: str) -> Tensor:
        """Return the positions [rows] int64, ascending, of a request at a site, without reading its rows."""
        number, site = self._request(request), self._site(site)
        found = []
        for step in self._steps:
            if site in step.sites and (step.request == number).any():
                with safe_open(step.path, framework="pt") as file:
                    owner, position = step.request, step.position
                    if file.get_slice(site).get_shape()[0] != len(owner):
                        assert step.sampled is not None
                        owner, position = owner[step.sampled], position[step.sampled]
                found.append(position[owner == number])
        return torch.cat(found).unique() if found else torch.empty(0, dtype=torch.int64)

    def _request(self, name: str) -> int:
        if name not in self._number:
            raise BadInput(
                f"no request {name!r}", where=str(self.directory), do=f"there are {', '.join(self.requests) or 'none'}"
            )
        return self._number[name]

    def _site(self, name: str) -> str:
        name = str(sites.parse(name))
        if name not in self.sites:
            near = difflib.get_close_matches(name, self.sites, n=1, cutoff=0.0)
            raise BadInput(
                f"site {name!r} was not captured",
                where=str(self.directory),
                do=f"the nearest is {near[0]!r}" if near else "it holds no sites",
            )
        return name


def _last_of_each(positions: list[Tensor], rows: list[Tensor], empty: Tensor) -> tuple[Tensor, Tensor]:
    """Join parts in the order of computation; of rows with one position the last stays, ordered by position."""
    if not positions:
        return torch.empty(0, dtype=torch.int64), empty
    position, values = torch.cat(positions), torch.cat(rows)
    if len(position) > 1 and not bool((position[1:] > position[:-1]).all()):
        ordered, order = position.sort(stable=True)
        last = torch.ones(len(ordered), dtype=torch.bool)
        last[:-1] = ordered[1:] != ordered[:-1]
        position, values = ordered[last], values[order[last]]
    return position, values
