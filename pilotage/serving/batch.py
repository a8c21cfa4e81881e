"""From what the scheduler wants computed to the fixed-shape inputs of the graphs.

A step may mix requests that decode one token with requests that prefill a chunk. The two run in separate graphs, so a
step becomes a list of forwards: at most one decode forward and any number of prefill forwards. Shapes are those of
core/shapes.md, with R the rows of the block table (requests, padded).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pilotage.serving.buckets import Key, Kind


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """One request of a step.

    Attributes:
        row: its row in the input batch.
        num_tokens: tokens to compute now.
        fresh: whether it enters (or re-enters) the batch in this step.
    """

    row: int
    num_tokens: int
    fresh: bool


@dataclass(frozen=True, kw_only=True)
class Forward:
    """Requests that share one run of a graph, by their rows in the input batch, and their token counts."""

    kind: Kind
    rows: tuple[int, ...]
    num_tokens: tuple[int, ...]


def split(
    step: Sequence[Scheduled], *, max_tokens: int, max_prefill_seqs: int, decode_token_threshold: int = 1
) -> list[Forward]:
    """Split a step into forwards, in the order in which they must run.

    A fresh request runs as prefill even when it needs a single token: the pages it found in the prefix cache may be
    written in this very step by a request scheduled before it. For the same reason decodes go first and prefills keep
    the scheduler's order; inside one forward every layer writes its pages before it reads them.

    Args:
        step: requests in the order in which the scheduler chose them.
        max_tokens: largest prefill bucket.
        max_prefill_seqs: rows of the block table in a prefill graph.
        decode_token_threshold: most tokens of a request that the decode graph takes.
    """
    decodes = sorted(
        (item for item in step if not item.fresh and item.num_tokens <= decode_token_threshold),
        key=lambda item: item.row,  # rows in batch order, so that the logits need no reordering
    )
    forwards = []
    if decodes:
        forwards.append(_forward("decode", decodes))
    group: list[Scheduled] = []
    for item in step:
        if not item.fresh and item.num_tokens <= decode_token_threshold:
            continue
        full = len(group) == max_prefill_seqs
        if group and (full or sum(other.num_tokens for other in group) + item.num_tokens > max_tokens):
            forwards.append(_forward("prefill", group))
            group = []
        group.append(item)
    if group:
        forwards.append(_forward("prefill", group))
    return forwards


def _forward(kind: Kind, items: Sequence[Scheduled]) -> Forward:
    return Forward(
        kind=kind,
        rows=tuple(item.row for item in items),
        num_tokens=tuple(item.num_tokens for item in items),
    )


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers that share a block table.

    Attributes:
        layer_names: names as in the model's KV spec, e.g. "layers.0.self_attn".
        block_size: slots in a page.
        max_blocks_per_seq: columns of the block table.
    """

    layer_names: tuple[str, ...]
    block_size: int
    max_blocks_per_seq: int


def _within(group: LayerGroup, context: int) -> LayerGroup:
    """Cut a group's block table to the pages of `context` tokens, 0 for all of them."""
    pages = -(-context // group.block_size) or group.max_blocks_per_seq
    return dataclasses.replace(group, max_blocks_per_seq=min(pages, group.max_blocks_per_seq))


class StepInputs:
    """The inputs of one graph: tensors of fixed shape and address, filled in place before each run.

    They are filled in host memory. Where the graph runs on a device (`on`), it gets copies there, which `send` brings
    up to date; `arguments` are what the graph is called with.

    Padding: a padded token has id 0, position 0, request row 0 and slot -1, and stands at or after
    `query_start_loc[-1]`; a padded row has no query and no length.

    Args:
        kind: of the graph.
        size: its tokens, T.
        num_rows: requests, R.
        groups: layers that share a block table.
        decode_token_threshold: most tokens of a request in a decode graph.
        key: what the graph is chosen by; its context shortens the block tables. None: its kind and size alone.

    Attributes:
        key: what the graph is chosen by.
        size: its tokens, T.
        input_ids: [T] int64. positions: [T] int32.
        sampling_positions: int64, the token rows that need logits: [R], the last one of each request, or [T] in a
            decode graph with several tokens a request, where the drafts among them are verified.
        sampled: how many of `sampling_positions` are real.
        attn_metadata: the documented dictionary by layer name; its tensors are shared by the layers of a group.
        sampling_params: [*, 3] fp32, top_k, top_p and temperature for each of `sampling_positions`, zero where the
            graph samples for nobody; None where it does not sample at all.
        sampling_noise: [*] fp64, with `sampling_params`.
        sampled_tokens: [*] int64, what the last run sampled; None where the graph does not sample.
        inputs_embeds: [T, D], rows that take the place of embedded tokens; None where no request may bring its own.
        is_token_ids: [T] bool, False for those rows; with `inputs_embeds`.
        wanted_rows: [T + 1] int32, how many rows of the hidden states are read and then which: all that are real, until
            `want_sampled` says otherwise. None in a decode graph, which reads them all.
        likely_only: [1] int32, 1 where nothing but the largest logit of a row is read, as `want_likely` says.
        hidden_states: [T, D], for a draft head that continues a model's; None for every other model.
        aux_hidden_states: [T, *], hidden states that the last run handed out for a draft head; None without one.
    """

    def __init__(
        self,
        kind: Kind,
        size: int,
        *,
        num_rows: int,
        groups: Sequence[LayerGroup],
        decode_token_threshold: int = 1,
        key: Key | None = None,
    ) -> None:
        self.kind, self.size, self.num_rows = kind, size, num_rows
        self.key = key or Key(kind, num_rows if kind == "decode" else size)
        self.groups = tuple(_within(group, self.key.context) for group in groups)
        self.verifies = kind == "decode" and decode_token_threshold > 1
        self.num_sampled = size if self.verifies else num_rows
        self.sampled = 0
        self.input_ids = torch.zeros(size, dtype=torch.int64)
        self.positions = torch.zeros(size, dtype=torch.int32)
        self.sampling_positions = torch.zeros(self.num_sampled, dtype=torch.int64)
        self.query_start_loc = torch.zeros(num_rows + 1, dtype=torch.int32)
        self.seq_lens = torch.zeros(num_rows, dtype=torch.int32)
        self.cached_seq_len = torch.zeros(num_rows, dtype=torch.int32)
        self.token_to_req = torch.zeros(size, dtype=torch.int32)
        self.slot_mappings = [torch.full((size,), -1, dtype=torch.int64) for _ in groups]
        self.block_tables = [
            torch.zeros(num_rows, group.max_blocks_per_seq, dtype=torch.int32) for group in self.groups
        ]
        max_query_len = decode_token_threshold if kind == "decode" else size
        self.attn_metadata: dict[str, Any] = {
            "decode_token_threshold": decode_token_threshold,
            "positions": self.positions,
        }
        self.wanted_rows = torch.zeros(size + 1, dtype=torch.int32) if kind == "prefill" else None
        if self.wanted_rows is not None:
            self.attn_metadata["wanted_rows"] = self.wanted_rows
        self.likely_only = self.attn_metadata["likely_only"] = torch.zeros(1, dtype=torch.int32)
        for group, slots, table in zip(self.groups, self.slot_mappings, self.block_tables, strict=True):
            shared = {
                "block_table_tensor": table,
                "slot_mapping": slots,
                "max_query_len": max_query_len,
                "block_size": group.block_size,
                "max_blocks_per_seq": group.max_blocks_per_seq,
                "decode_token_threshold": decode_token_threshold,
                "cached_seq_len": None if self.key.fresh else self.cached_seq_len,
                "kv_segment_size": self.key.segment,
                "query_start_loc": self.query_start_loc,
                "seq_lens": self.seq_lens,
                "token_to_req": self.token_to_req,
            }
            self.attn_metadata.update(dict.fromkeys(group.layer_names, shared))
        self._np = {
            name: getattr(self, name).numpy()
            for name in (
                "input_ids",
                "positions",
                "sampling_positions",
                "query_start_loc",
                "seq_lens",
                "cached_seq_len",
                "token_to_req",
            )
        }
        self.sampling_params: torch.Tensor | None = None
        self.sampling_noise: torch.Tensor | None = None
        self.sampled_tokens: torch.Tensor | None = None
        self.inputs_embeds: torch.Tensor | None = None
        self.is_token_ids: torch.Tensor | None = None
        self.hidden_states: torch.Tensor | None = None
        self.aux_hidden_states: torch.Tensor | None = None
        self._copies: dict[int, torch.Tensor] = {}  # by the host tensor's identity
        self._metadata: dict[str, Any] = {}
        self._slots_np = [slots.numpy() for slots in self.slot_mappings]
        self._tables_np = [table.numpy() for table in self.block_tables]
        self.clear()

    def add_sampling(self) -> None:
        """Have the graph sample."""
        self.sampling_params = torch.zeros(self.num_sampled, 3)
        self.sampling_noise = torch.zeros(self.num_sampled, dtype=torch.float64)

    def add_embeds(self, width: int, dtype: torch.dtype) -> None:
        """Let requests bring rows [*, width] in the place of tokens."""
        self.inputs_embeds = torch.zeros(self.size, width, dtype=dtype)
        self.is_token_ids = torch.ones(self.size, dtype=torch.bool)

    def add_hidden_states(self, width: int, dtype: torch.dtype) -> None:
        """Let the graph read a hidden state beside each token."""
        self.hidden_states = torch.zeros(self.size, width, dtype=dtype)

    def on(self, device: torch.device) -> None:
        """Give the graph tensors of its own on `device`; call it after what the graph samples and takes is settled."""
        self._copies = {id(host): torch.empty_like(host, device=device).copy_(host) for host in self.tensors()}
        moved = {id(entry): self._moved(entry) for entry in self.attn_metadata.values() if isinstance(entry, dict)}
        self._metadata = {
            key: moved[id(entry)] if isinstance(entry, dict) else self._copies.get(id(entry), entry)
            for key, entry in self.attn_metadata.items()
        }

    def _moved(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        return {key: self._copies.get(id(value), value) for key, value in entry.items()}

    def send(self) -> None:
        """Bring the device's copies up to date."""
        if self._copies:
            for host in self.tensors():
                self._copies[id(host)].copy_(host)

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the forward that are inputs of a step."""
        given = {
            "input_ids": self.input_ids,
            "positions": self.positions,
            "sampling_positions": self.sampling_positions,
            "sampling_params": self.sampling_params,
            "sampling_noise": self.sampling_noise,
            "inputs_embeds": self.inputs_embeds,
            "is_token_ids": self.is_token_ids,
            "hidden_states": self.hidden_states,
        }
        tensors = {name: self._copies.get(id(value), value) for name, value in given.items() if value is not None}
        return {**tensors, "attn_metadata": self._metadata or self.attn_metadata}

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor that is written before a run."""
        own = [self.input_ids, self.positions, self.sampling_positions, self.query_start_loc, self.seq_lens]
        some = (
            *(self.sampling_params, self.sampling_noise),
            *(self.inputs_embeds, self.is_token_ids, self.hidden_states, self.wanted_rows),
        )
        own += [tensor for tensor in some if tensor is not None]
        return [*own, self.likely_only, self.cached_seq_len, self.token_to_req, *self.slot_mappings, *self.block_tables]

    def clear(self) -> None:
        """Make every token and row padding."""
        self.sampled = 0
        for array in self._np.values():
            array.fill(0)
        for array in (*self._slots_np, *self._tables_np):
            array.fill(0)
        for slots in self._slots_np:
            slots.fill(-1)
        if self.sampling_params is not None:
            self.sampling_params.zero_()
        if self.is_token_ids is not None:
            self.is_token_ids.fill_(True)
        if self.wanted_rows is not None:
            self.wanted_rows.zero_()
        self.likely_only.zero_()

    def want_likely(self) -> None:
        """Let the head leave out logits that are not the largest of their row; after `fill`."""
        self.likely_only.fill_(1)

    def want_sampled(self) -> None:
        """Let the last layer leave out what only hidden states of other rows would show; after `fill`."""
        if self.wanted_rows is not None:
            self.wanted_rows[0] = self.sampled
            self.wanted_rows[1 : self.sampled + 1] = self.sampling_positions[: self.sampled]

    def sampled_rows(self, forward: Forward, counts: Sequence[int]) -> list[range | None]:
        """Say which rows of logits are those of each request's last tokens.

        Args:
            forward: what is computed.
            counts: of each of its requests, how many of its last tokens need logits.

        Returns:
            For each request the rows of `sampling_positions`; None where the graph has logits of its last token only.
        """
        if not self.verifies:
            return [range(row, row + 1) if count == 1 else None for row, count in enumerate(counts)]
        ends = np.cumsum(forward.num_tokens).tolist()
        return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]

    def fill_embeds(
        self,
        forward: Forward,
        *,
        embeds: Mapping[int, torch.Tensor],
        is_token_ids: npt.NDArray[np.bool_],
        num_computed: npt.NDArray[np.int32],
    ) -> None:
        """Write the rows that requests brought themselves, after `fill`.

        Args:
            forward: as for `fill`.
            embeds: row of the input batch -> [prompt, D].
            is_token_ids: [max requests, max length], False where a position has such a row.
            num_computed: as for `fill`.
        """
        if self.inputs_embeds is None or self.is_token_ids is None:
            return
        first = 0
        for row, count in zip(forward.rows, forward.num_tokens, strict=True):
            if row in embeds:
                start = int(num_computed[row])
                rows = embeds[row][start : start + count]
                self.inputs_embeds[first : first + len(rows)] = rows
                self.is_token_ids[first : first + len(rows)] = torch.from_numpy(
                    is_token_ids[row, start : start + len(rows)]
                )
            first += count

    def fill(
        self,
        forward: Forward,
        *,
        token_ids: npt.NDArray[np.int32],
        num_computed: npt.NDArray[np.int32],
        block_tables: Sequence[npt.NDArray[np.int32]],
    ) -> None:
        """Write one forward's tokens, positions, slots and block tables.

        Args:
            forward: rows and token counts; must fit this graph.
            token_ids: [max requests, max length] of the whole input batch.
            num_computed: [max requests] tokens whose keys and values are in the cache already.
            block_tables: for each group [max requests, >= max_blocks_per_seq] page numbers.
        """
        self.clear()
        rows = np.asarray(forward.rows, dtype=np.int64)
        counts = np.asarray(forward.num_tokens, dtype=np.int64)
        n, total = len(rows), int(counts.sum())
        start = num_computed[rows].astype(np.int64)
        ends = np.cumsum(counts)
        local = np.repeat(np.arange(n), counts)  # request row of each token
        position = np.arange(total) - np.repeat(ends - counts, counts) + np.repeat(start, counts)
        arrays = self._np
        # vLLM pads drafts with -1; they are rejected, whatever is computed for them.
        arrays["input_ids"][:total] = np.maximum(token_ids[rows[local], position], 0)
        arrays["positions"][:total] = position
        arrays["token_to_req"][:total] = local
        arrays["seq_lens"][:n] = start + counts
        arrays["cached_seq_len"][:n] = start
        self.sampled = total if self.verifies else n
        arrays["sampling_positions"][: self.sampled] = np.arange(total) if self.verifies else ends - 1
        if self.wanted_rows is not None:
            self.wanted_rows[0] = total
            self.wanted_rows[1 : total + 1] = torch.arange(total, dtype=torch.int32)
        arrays["query_start_loc"][1 : n + 1] = ends
        arrays["query_start_loc"][n + 1 :] = total
        for group, source, table, slots in zip(self.groups, block_tables, self._tables_np, self._slots_np, strict=True):
            table[:n] = source[rows, : group.max_blocks_per_seq]
            page = table[local, position // group.block_size].astype(np.int64)
            slots[:total] = page * group.block_size + position % group.block_size
