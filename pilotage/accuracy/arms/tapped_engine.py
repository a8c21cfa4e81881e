"""The running engine as an arm whose every site is recorded while a reference is handed onward.

The same schedule of requests is driven again and again through one engine: with the reference at every site, free, with
the reference at some sites. The tapped graphs stay the same all the while; only masks change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from pilotage.accuracy.arms.tapped import HEAD_SITES, Cached, Handed, Request, Rows
from pilotage.accuracy.localise.around import Misstep

if TYPE_CHECKING:
    from pilotage.serving import drive


class TappedEngine:
    """vLLM with a model of this project.

    The head's own site is left out: inside the graph it sees sampled rows only. The logits are compared at every kept
    position, as the recorder has them.

    Args:
        checkpoint: directory.
        dtype: "float32" or "bfloat16" as a torch dtype.
        longest: tokens of the longest request.
        eager: do not compile.
        ranks: tensor-parallel ranks.
        options: further arguments of `launch.engine`.
        schedule: how requests arrive and what is computed in each step (`drive.Schedule` as JSON values, its requests
            replaced by those observed); None hands them all in at once.

    Attributes:
        missing: for each request the positions that the last run did not compute (a prefix was cached) or computed for
            another token, [length] bool.
        missteps: tokens that were fed or answered wrongly so far.
    """

    def __init__(
        self,
        checkpoint: Path,
        dtype: torch.dtype,
        longest: int,
        *,
        eager: bool = False,
        ranks: int = 1,
        options: Mapping[str, Any] | None = None,
        schedule: Mapping[str, Any] | None = None,
    ) -> None:
        from pilotage.accuracy.arms.module import OurModules

        # Without the engine, for what is known of the model besides its rows.
        self.model = OurModules(checkpoint, dtype, longest).model
        self.checkpoint, self.dtype, self.eager, self.ranks = checkpoint, dtype, eager, ranks
        self.options, self.schedule = dict(options or {}), dict(schedule or {})
        self.missing: list[Tensor] = []
        self.missteps: list[Misstep] = []
        self._said: tuple[tuple[int, ...], ...] = ()
        self._stack = contextlib.ExitStack()
        self._llm: Any = None
        self._reference: Rows | None = None

    @property
    def name(self) -> str:
        how = "eager" if self.eager else "compiled"
        return f"engine, {how}" + (f", {self.ranks} ranks" if self.ranks > 1 else "")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine."""
        self._llm = None
        self._stack.close()

    def names(self, tokens: Sequence[int]) -> list[str]:
        """List the sites in the order of the model."""
        from pilotage.probe.discovery import describe

        found = [name for name, info in describe(self.model).items() if info.shape is not None]
        return [*(name for name in found if name not in HEAD_SITES), "logits"]

    def observe(
        self, requests: Sequence[Request], sites: Sequence[str] | None = None, handed: Handed | None = None
    ) -> Rows:
        """See `HFTapped.observe`.

        Raises:
            PilotageError: the engine did not start.
        """
        wanted = [site for site in (sites or ()) if site not in HEAD_SITES]
        llm = self._engine()
        with tempfile.TemporaryDirectory(prefix="pilotage-taps-") as directory:
            self._hand(llm, requests, handed)
            captured = f"{directory}/taps"
            if wanted:
                llm.collective_rpc("capture_start", args=(captured, wanted, False))
            try:
                logits = self._drive(llm, requests, Path(directory) / "logits")
            finally:
                if wanted:
                    self._keep_taps(llm)
                    llm.collective_rpc("capture_stop")
            rows = self._read(Path(captured), requests, wanted) if wanted else {}
        return {**rows, "logits": logits}

    def cached(self, requests: Sequence[Request], handed: Handed) -> dict[str, Cached]:
        """Run once more and read the pages of finished requests; see `PagedTapped.cached`."""
        from pilotage.accuracy.arms.engine import read_kv

        llm = self._engine()
        with tempfile.TemporaryDirectory(prefix="pilotage-taps-") as directory:
            self._hand(llm, requests, handed)
            llm.collective_rpc("kv_read_start", args=(f"{directory}/kv",))
            try:
                self._drive(llm, requests, Path(directory) / "logits")
            finally:
                kept = llm.collective_rpc("kv_read_stop")
            layers = read_kv(kept, len(requests))
        found: dict[str, Cached] = {}
        for index in range(len(layers[0])):
            entries = [request[index] for request in layers]
            # With drafts the last step may compute more than the request takes.
            kept = [max(request.length - entry.first, 0) for request, entry in zip(requests, entries, strict=True)]
            found[f"model.{entries[0].layer}"] = Cached(
                first=[min(entry.first, request.length) for request, entry in zip(requests, entries, strict=True)],
                keys=[entry.keys[:count] for entry, count in zip(entries, kept, strict=True)],
                values=[entry.values[:count] for entry, count in zip(entries, kept, strict=True)],
            )
        return found

    def _engine(self) -> Any:
        if self._llm is None:
            from pilotage.serving import settings
            from pilotage.serving.launch import engine

            arguments = {
                **settings.shared(self.checkpoint, str(self.dtype).removeprefix("torch.")),
                # A hit would leave rows uncomputed, and keys of a replaced run would serve another.
                "enable_prefix_caching": False,
                **self.options,
                "tensor_parallel_size": self.ranks,
                "enforce_eager": self.eager,
            }
            # Only the tapped graphs are needed, and those are compiled when the first request wants them.
            arguments["additional_config"] = {**arguments["additional_config"], "lazy_compile": True}
            self._llm = self._stack.enter_context(engine(self.checkpoint, **arguments))
        return self._llm

    def _hand(self, llm: Any, requests: Sequence[Request], handed: Handed | None) -> None:
        if handed is not None and self._reference is not handed.rows:
            from pilotage.probe.captures import CaptureWriter

            directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="pilotage-reference-"))
            with CaptureWriter(directory, arm="hf") as writer:
                for index, request in enumerate(requests):
                    name = str(index)
                    writer.request(name, request.prompt)
                    rows = {site: found[index] for site, found in handed.rows.items() if site not in HEAD_SITES}
                    writer.add(
                        rows,
                        requests=[name] * request.length,
                        positions=range(request.length),
                        tokens=request.tokens[:-1],
                    )
            llm.collective_rpc("replace_start", args=(directory, None, None, False))
            self._reference = handed.rows
        if self._reference is not None:
            sites = [] if handed is None else [s for s in self._reference if handed.at(s) and s not in HEAD_SITES]
            llm.collective_rpc("replace_sites", args=(sites,))

    def _keep_taps(self, llm: Any) -> None:
        """The engine drops taps that nothing uses; the ones it has would have to be compiled again."""
        if self._reference is not None:
            llm.collective_rpc("replace_sites", args=([s for s in self._reference if s not in HEAD_SITES],))

    def _drive(self, llm: Any, requests: Sequence[Request], directory: Path) -> list[Tensor]:
        """Run the requests; returns their logits at the kept positions."""
        driven = [_driven(request) for request in requests]
        positions = sorted({position for request in requests for position in request.kept})
        rows = self._recorded(llm, driven, directory, positions)
        found = []
        for index, request in enumerate(requests):
            width = next(iter(rows.values()))
            lost = torch.full_like(width, float("nan"))
            found.append(torch.stack([rows.get((index, position), lost) for position in request.kept]))
        return found

    def _recorded(
        self, llm: Any, requests: Sequence[drive.Request], directory: Path, positions: Sequence[int] | None
    ) -> Mapping[tuple[int, int], Tensor]:
        """Run requests under the schedule; returns (request, position) -> logits, and notes wrong answers."""
        from pilotage.accuracy.invariance import tokens
        from pilotage.accuracy.invariance.rows import read
        from pilotage.serving import drive

        how = {name: value for name, value in self.schedule.items() if name != "requests"}
        schedule = dataclasses.replace(drive.Schedule.from_json({**how, "requests": []}), requests=tuple(requests))
        llm.collective_rpc("record_start", args=(str(directory), positions))
        try:
            self._said = drive.drive(llm, schedule).said
        except drive.NotFollowed as error:
            self._said = error.drove.said
        finally:
            files = llm.collective_rpc("record_stop")[0]
        rows = read(directory, files).logits
        for number, (request, said) in enumerate(zip(requests, self._said, strict=True)):
            found = tokens.odd(request, said, {p: row for (r, p), row in rows.items() if r == number})
            if found is not None:
                position, token, due = found
                self.missteps.append(Misstep(kind="answered", request=number, position=position, token=token, due=due))
        return rows

    def choose(self, requests: Sequence[Request]) -> None:
        """Let the engine choose the tokens, with drafts of which the same ones are right, and note wrong answers."""
        llm = self._engine()
        self._hand(llm, requests, None)
        free = [dataclasses.replace(_driven(request), forced=False) for request in requests]
        plain = [dataclasses.replace(request, drafts=((),) * len(request.continuation)) for request in free]
        with tempfile.TemporaryDirectory(prefix="pilotage-choice-") as directory:
            self._recorded(llm, plain, Path(directory) / "plain", None)
            if all(self._said):
                drafted = [request.says(said) for request, said in zip(free, self._said, strict=True)]
                self._recorded(llm, drafted, Path(directory) / "drafted", None)

    def _read(self, directory: Path, requests: Sequence[Request], sites: Sequence[str]) -> Rows:
        from pilotage.probe.captures import Captures
        from pilotage.serving.drive import numbers

        captures = Captures.open(directory)
        names = list(captures.requests)
        by_number = dict(zip(numbers(names), names, strict=True))
        rows: Rows = {}
        self.missing = [self._odd(captures, by_number[i], i, request) for i, request in enumerate(requests)]
        for site in sites:
            for index, request in enumerate(requests):
                positions, values = captures.get(by_number[index], site)
                whole = values.new_full((request.length, *values.shape[1:]), float("nan"))
                inside = positions < request.length
                whole[positions[inside]] = values[inside]
                rows.setdefault(site, []).append(whole)
        return rows

    def _odd(self, captures: Any, name: str, number: int, request: Request) -> Tensor:
        """Return the positions [length] of a request without a row of their own, and note tokens fed wrongly."""
        positions, fed = captures.tokens(name)
        inside = positions < request.length
        positions, fed = positions[inside], fed[inside]
        said = torch.full((request.length,), -1)  # nothing is due behind what was answered
        known = (*request.prompt, *self._said[number])[: request.length]
        said[: len(known)] = torch.tensor(known)
        found = torch.full((request.length,), -1)
        found[positions] = fed
        first = int(positions[0]) if len(positions) else request.length
        # Where nothing is found in a cache, everything is computed.
        start = first if self.options.get("enable_prefix_caching") else 0
        wrong = (found != said).nonzero()[:, 0]
        self.missteps += [
            Misstep(kind="fed", request=number, position=p, token=int(found[p]), due=int(said[p]))
            for p in wrong.tolist()
            if p >= start
        ]
        # What the engine answered wrongly it is fed next: there the reference has nothing to say.
        return (found != torch.tensor(request.tokens[: request.length])).clone()


def _driven(request: Request) -> drive.Request:
    from pilotage.serving import drive

    return drive.Request(
        tokens=request.tokens, prompt=request.prompt_length, arrives=request.arrives, drafts=request.drafts
    )
