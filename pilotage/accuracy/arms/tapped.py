"""Arms whose every site is recorded while a reference is handed onward.

Each site then sees the inputs that it has in the reference, whatever the sites before it made of theirs: its error is
its own. `HFTapped` is any Hugging Face model, `PagedTapped` one of ours on its paged cache, without the engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pilotage.core import tap
from pilotage.core.errors import PilotageError
from pilotage.probe.hf import HFTaps

# Site -> for each request of the feed its rows [positions, ...], or only some of them (see `Feed.kept`).
Rows = dict[str, list[Tensor]]
HEAD_SITES = ("lm_head", "logits")
# Tokens of padding at the end of a prefill step, and rows of a decode step that belong to nobody.
PADDING = 3


@dataclass(frozen=True, kw_only=True)
class Request:
    """A token stream and how it is fed.

    Attributes:
        tokens: all tokens; the last is never an input.
        parts: sizes of the prefill's parts; the first is computed with nothing cached.
        kept: ascending positions whose logits are compared.
        arrives: step before which it is handed to an engine.
        drafts: see `serving.drive.Request`.
        forced: False where the condition is about tokens that the engine chooses; taps force them all the same.
    """

    tokens: tuple[int, ...]
    parts: tuple[int, ...]
    kept: tuple[int, ...]
    arrives: int = 0
    drafts: tuple[tuple[int, ...], ...] = ()
    forced: bool = True

    @property
    def length(self) -> int:
        return len(self.tokens) - 1

    @property
    def prompt_length(self) -> int:
        return sum(self.parts)

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.tokens[: self.prompt_length]

    def phases(self) -> list[str]:
        """Name the phase of each position: "prefill", "chunk" (reads the cache) or "decode"."""
        chunk = sum(self.parts[1:])
        return ["prefill"] * self.parts[0] + ["chunk"] * chunk + ["decode"] * (self.length - self.parts[0] - chunk)


@dataclass(frozen=True, kw_only=True)
class Handed:
    """What is handed onward.

    Attributes:
        rows: site -> for each request its rows.
        only: the sites that are replaced; None for all of `rows`.
    """

    rows: Rows
    only: frozenset[str] | None = None

    def at(self, site: str) -> list[Tensor] | None:
        return self.rows.get(site) if self.only is None or site in self.only else None


@dataclass(frozen=True, kw_only=True)
class Cached:
    """What a layer's pages hold at the end of a run.

    Attributes:
        first: for each request the first position that is still there.
        keys, values: for each request [positions, K, H] from that position on.
    """

    first: Sequence[int]
    keys: Sequence[Tensor]
    values: Sequence[Tensor]


class HFTapped:
    """A Hugging Face model; computes each request in one forward.

    Args:
        model: loaded.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.taps = HFTaps(model)

    def names(self, tokens: Sequence[int]) -> list[str]:
        """See `HFTaps.names`."""
        return self.taps.names(tokens)

    @torch.inference_mode()
    def observe(
        self, requests: Sequence[Request], sites: Sequence[str] | None = None, handed: Handed | None = None
    ) -> Rows:
        """Record `sites` (None for all) of every request; equal token streams are computed once."""
        wanted = None if sites is None else set(sites)
        rows: Rows = {}
        done: dict[tuple[Any, ...], dict[str, Tensor]] = {}
        for index, request in enumerate(requests):
            key = (request.tokens, request.kept)
            if key not in done:
                done[key] = self._forward(request, index, wanted, handed)
            for site, found in done[key].items():
                rows.setdefault(site, []).append(found)
        return rows

    def _forward(
        self, request: Request, index: int, wanted: set[str] | None, handed: Handed | None
    ) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}

        def visit(site: str, rows: Tensor) -> Tensor | None:
            if wanted is not None and site not in wanted:
                return None
            found[site] = rows.clone()
            reference = None if handed is None else handed.at(site)
            return None if reference is None else reference[index].to(rows.dtype)

        with self.taps.attached(visit):
            self.model(
                input_ids=torch.tensor([request.tokens[:-1]]),
                use_cache=False,
                logits_to_keep=torch.tensor(request.kept),
            )
        return found


@dataclass
class _Step:
    """One forward of ours: which request and position each of its first rows is, and which of them have logits."""

    rows: list[tuple[int, int]]
    kept: list[tuple[int, int]]
    seen: set[str] = field(default_factory=set)


class PagedTapped:
    """One of our models on a paged cache: prefill with nothing cached, parts that read it, then decode; all padded.

    Args:
        checkpoint: directory.
        dtype: of weights and computation.
        longest: tokens of the longest request.
    """

    name = "in process"

    def __init__(self, checkpoint: Path, dtype: torch.dtype, longest: int) -> None:
        from pilotage.accuracy.arms.module import OurModules

        self.model = OurModules(checkpoint, dtype, longest).model
        self.dtype, self.longest = dtype, longest
        self.pages: Any = None

    def names(self, tokens: Sequence[int]) -> list[str]:
        """List the sites in the order in which a forward over `tokens` meets them."""
        found: dict[str, None] = {}

        def note(site: str, x: Tensor) -> Tensor:
            found.setdefault(site)
            return x

        request = Request(tokens=(*tokens, 0), parts=(len(tokens),), kept=(0,))
        session = self._session([request])
        with self._listening(note):
            self._forward(session, [request], {0: len(tokens)}, _Step(rows=[], kept=[]), fresh=True)
        return [*found, "logits"]

    @torch.inference_mode()
    def observe(
        self, requests: Sequence[Request], sites: Sequence[str] | None = None, handed: Handed | None = None
    ) -> Rows:
        """See `HFTapped.observe`; the pages are kept for `cached`."""
        wanted = None if sites is None else set(sites)
        parts: dict[str, list[tuple[list[tuple[int, int]], Tensor]]] = {}
        session = self._session(requests)
        self.pages, self._table = session.pages, session.block_table
        self._block_size = session.block_size
        for counts, how in self._schedule(requests):
            step = _Step(rows=[], kept=[])

            def listen(site: str, x: Tensor, step: _Step = step) -> Tensor:
                # Module and model code may both name a place; only the first is what was computed there.
                if (wanted is not None and site not in wanted) or site in step.seen:
                    return x
                step.seen.add(site)
                where = step.kept if site in HEAD_SITES else step.rows
                parts.setdefault(site, []).append((where, x[: len(where)].clone()))
                reference = None if handed is None else handed.at(site)
                if reference is None or not where:
                    return x
                replaced = x.clone()
                rows = [reference[r][self._row(requests[r], p, site)] for r, p in where]
                replaced[: len(where)] = torch.stack(rows).to(x.dtype)
                return replaced

            with self._listening(listen):
                logits = self._forward(session, requests, counts, step, **how)
            if wanted is None or "logits" in wanted:
                parts.setdefault("logits", []).append((step.kept, logits[: len(step.kept)].clone()))
        return {site: _assembled(found, requests, site) for site, found in parts.items()}

    @staticmethod
    def _row(request: Request, position: int, site: str) -> int:
        return request.kept.index(position) if site in HEAD_SITES else position

    def _session(self, requests: Sequence[Request]) -> Any:
        from pilotage.models.common.paging import PagedSession

        # One more request than there are, so that a decode step has a row of padding.
        return PagedSession(model=self.model, num_requests=len(requests) + 1, max_tokens=self.longest, block_size=16)

    @staticmethod
    def _schedule(requests: Sequence[Request]) -> Iterator[tuple[dict[int, int], dict[str, Any]]]:
        """Yield, for each step, request -> its new tokens, and the step's kind."""
        yield {i: request.parts[0] for i, request in enumerate(requests)}, {"fresh": True}
        for part in range(1, max(len(request.parts) for request in requests)):
            # In another order than before: a batch need not keep it.
            yield {i: r.parts[part] for i, r in reversed(list(enumerate(requests))) if part < len(r.parts)}, {}
        left = [request.length - sum(request.parts) for request in requests]
        for step in range(max(left)):
            yield {i: 1 for i, count in enumerate(left) if step < count}, {"decode": True}

    def _forward(
        self, session: Any, requests: Sequence[Request], counts: Mapping[int, int], step: _Step, **how: Any
    ) -> Tensor:
        from pilotage.models.common.paging import build_metadata

        order = list(counts)
        others = [r for r in range(session.num_requests) if r not in counts]
        done = [len(session.history[r]) for r in order]
        flat: list[int] = []
        sampled: list[int] = []
        for r, start in zip(order, done, strict=True):
            kept = set(requests[r].kept)
            for position in range(start, start + counts[r]):
                if position in kept:
                    sampled.append(len(flat))
                    step.kept.append((r, position))
                step.rows.append((r, position))
                flat.append(requests[r].tokens[position])
        bucket = session.num_requests if how.get("decode") else len(flat) + PADDING
        context = build_metadata(
            session.layer_names,
            num_computed=done,
            num_new=[counts[r] for r in order],
            block_table=session.block_table[[*order, *others]],
            block_size=session.block_size,
            num_tokens=bucket,
            **how,
        )
        ids = torch.tensor(flat + [0] * (bucket - len(flat)))
        with torch.inference_mode():
            # A head wants at least one row.
            logits = self.model(ids, context["positions"], context, torch.tensor(sampled or [0]))
        for r in order:
            session.history[r].extend(requests[r].tokens[len(session.history[r]) :][: counts[r]])
        return logits

    @contextlib.contextmanager
    def _listening(self, listen: Any) -> Iterator[None]:
        hooks = []
        for name, module in self.model.named_modules():
            if name and name not in ("model",) and not isinstance(module, torch.nn.ModuleList):
                hooks.append(module.register_forward_hook(_hook(name, listen)))
        try:
            with tap.active(tap.TapPlan(listener=listen)):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def cached(self, requests: Sequence[Request], handed: Handed) -> dict[str, Cached]:
        """Read the pages back that `observe` left, by attention module.

        Raises:
            PilotageError: nothing has been computed yet.
        """
        if self.pages is None:
            raise PilotageError("nothing is cached yet", where="PagedTapped", do="call observe first")
        found: dict[str, Cached] = {}
        for name, pages in self.pages.items():
            sides: tuple[list[Tensor], list[Tensor]] = ([], [])
            for index, request in enumerate(requests):
                at = torch.arange(request.length)
                blocks = self._table[index].long()[at // self._block_size]
                for side, page in zip(sides, pages, strict=True):
                    side.append(page[blocks, :, at % self._block_size])
            found[f"model.{name}"] = Cached(first=[0] * len(requests), keys=sides[0], values=sides[1])
        return found


def _hook(name: str, listen: Any) -> Any:
    def hook(_: Any, args: Any, output: Any) -> Any:
        return listen(name, output) if isinstance(output, Tensor) else None

    return hook


def _assembled(
    found: list[tuple[list[tuple[int, int]], Tensor]], requests: Sequence[Request], site: str
) -> list[Tensor]:
    """Put the rows of all steps in the order of each request's positions."""
    whole: list[Tensor] = []
    first = found[0][1]
    head = site in HEAD_SITES
    for request in requests:
        # What no step computed must not look like a value.
        whole.append(first.new_full((len(request.kept) if head else request.length, *first.shape[1:]), float("nan")))
    for where, rows in found:
        for row, (r, position) in enumerate(where):
            whole[r][requests[r].kept.index(position) if head else position] = rows[row]
    return whole
