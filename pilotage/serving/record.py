"""Recording of raw logits from inside the running engine, for validation.

At a vocabulary of 262,144 a row is 1 MiB, so rows never pass through vLLM's outputs: each forward writes one
safetensors file, a few rows at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pilotage.core import store
from pilotage.serving.batch import Forward

if TYPE_CHECKING:
    from torch import Tensor

ROWS = 64


def _stream_safetensors(path: Path, logits: Iterator[Tensor], shape: tuple[int, int], index: dict[str, Tensor]) -> None:
    """Write a safetensors file whose tensor "logits" arrives in pieces.

    Args:
        path: where the whole file appears at the end.
        logits: pieces [some rows, V] fp32 that together make `shape`.
        shape: rows and vocabulary.
        index: small tensors to store beside it, int64.
    """
    header: dict[str, Any] = {}
    offset = 0
    sizes = {"logits": ("F32", shape, shape[0] * shape[1] * 4)}
    sizes |= {name: ("I64", tuple(value.shape), value.numel() * 8) for name, value in index.items()}
    for name, (dtype, dims, length) in sizes.items():
        header[name] = {"dtype": dtype, "shape": list(dims), "data_offsets": [offset, offset + length]}
        offset += length
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as out:
            out.write(len(encoded).to_bytes(8, "little"))
            out.write(encoded)
            for piece in logits:
                out.write(memoryview(piece.float().contiguous().numpy()).cast("B"))
            for value in index.values():
                out.write(value.to(torch.int64).contiguous().numpy().tobytes())

    store.write_file(path, write)


class Recorder:
    """Writes one file per forward: `logits` [rows, V] fp32, `position` [rows], `request` [rows].

    `request` counts in the order of `requests.json`, which lists vLLM's request ids. The row at position p predicts
    the token at p + 1. Rows that a prefix-cache hit did not compute are absent. `forwards.json` lists every forward,
    with rows recorded or not: its kind, the size of its graph, and for each request its number, first position and
    count of tokens, in the order in which they were packed.
    """

    def __init__(self, directory: Path, *, write: bool, positions: Sequence[int] | None = None) -> None:
        """Start recording.

        Args:
            directory: created; should be empty.
            write: False on ranks that only take part in computing the logits.
            positions: the positions that are recorded, of every request; None for all of them.
        """
        self.directory, self.writing = directory, write
        self.wanted = None if positions is None else torch.tensor(sorted(positions))
        self.files: list[str] = []
        self.requests: dict[str, int] = {}
        self.forwards: list[dict[str, Any]] = []
        if write:
            directory.mkdir(parents=True, exist_ok=True)

    def add(
        self,
        forward: Forward,
        req_ids: Sequence[str],
        num_computed: Sequence[int],
        logits: Tensor,
        hidden: Tensor,
        compute_logits: Callable[[Tensor], Tensor],
        sampled_at: Sequence[int] | None = None,
    ) -> None:
        """Record the wanted positions of a forward.

        Args:
            forward: its rows and token counts.
            req_ids: request id of each of its rows.
            num_computed: tokens computed before this forward, for each row.
            logits: [rows of the graph, V] of the sampled positions, as the graph returned them.
            sampled_at: token of each of those rows; the last one of each request when not given.
            hidden: [tokens of the graph, D] after the final norm.
            compute_logits: the model's head, for the positions that were not sampled.
        """
        numbers = [self.requests.setdefault(req_id, len(self.requests)) for req_id in req_ids]
        packed = zip(numbers, map(int, num_computed), forward.num_tokens, strict=True)
        self.forwards.append(
            {"kind": forward.kind, "size": hidden.shape[0], "requests": [list(item) for item in packed]}
        )
        counts = torch.tensor(forward.num_tokens)
        index = {
            "position": torch.cat(
                [torch.arange(done, done + n) for done, n in zip(num_computed, forward.num_tokens, strict=True)]
            ),
            "request": torch.repeat_interleave(torch.tensor(numbers), counts),
        }
        tokens = torch.arange(int(counts.sum()))
        if self.wanted is not None:
            tokens = tokens[torch.isin(index["position"], self.wanted)]
            index = {name: value[tokens] for name, value in index.items()}
        if not len(tokens):
            return
        if sampled_at is None:
            sampled_at = (counts.cumsum(0) - 1).tolist()
        sampled = {token: row for row, token in enumerate(sampled_at)}

        # One request at a time: the head's rows must not depend on who else is in the batch.
        shares = tokens.split(torch.bincount(index["request"], minlength=len(self.requests))[numbers].tolist())

        def pieces() -> Iterator[Tensor]:
            for some in (piece for share in shares if len(share) for piece in share.split(ROWS)):
                rows: dict[int, Tensor] = {}
                others = [token for token in some.tolist() if token not in sampled]
                if others:
                    rows = dict(zip(others, compute_logits(hidden[torch.tensor(others)]), strict=True))
                # What was sampled from is recorded as it was, not computed again.
                rows |= {token: logits[sampled[token]] for token in some.tolist() if token in sampled}
                yield torch.stack([rows[token].float() for token in some.tolist()])

        if self.writing:
            path = self.directory / f"{len(self.files):06d}.safetensors"
            _stream_safetensors(path, pieces(), (len(tokens), logits.shape[1]), index)
            self.files.append(str(path))
        else:
            for _ in pieces():  # the head may contain collectives, which every rank must join
                pass

    def stop(self) -> list[str]:
        """Write the lists of requests and of forwards; returns the files, in the order in which they were computed."""
        if self.writing:
            store.write_json(self.directory / "requests.json", list(self.requests))
            store.write_json(self.directory / "forwards.json", self.forwards)
        return self.files
