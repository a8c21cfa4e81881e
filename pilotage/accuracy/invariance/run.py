"""Start each engine once, put it into all of its conditions, and judge every relation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pilotage.accuracy.arms.base import Stream
from pilotage.accuracy.invariance import noise as noises
from pilotage.accuracy.invariance import over_http, plans
from pilotage.accuracy.invariance.bench import (
    DRAFTING,
    ENGINES,
    RANKS,
    SERVED,
    SERVER,
    SHARP,
    UNCOMPILED,
    Bench,
    Settings,
    drawn,
    positions,
    settings,
)
from pilotage.accuracy.invariance.judge import Result, judge
from pilotage.accuracy.invariance.noise import Noise
from pilotage.accuracy.invariance.plans import Plan
from pilotage.accuracy.invariance.result import Invariance
from pilotage.accuracy.invariance.rows import differences
from pilotage.accuracy.invariance.streams import Streams
from pilotage.core.errors import BadInput
from pilotage.core.nouns import Status, Verdict
from pilotage.core.progress import track

SMALL_HIDDEN = 256  # a model this narrow takes milliseconds a step and gets every edge
# Engines whose requests are the same, so that their rows can be held against each other: engine -> (partner, relation).
PARTNERS = {
    DRAFTING: (SHARP, plans.SPECULATION),
    RANKS: (SHARP, plans.PARALLEL),
    UNCOMPILED: (SERVED, plans.COMPILED),
    SERVER: (SERVED, plans.SERVER),
}


def invariance(
    model: str,
    *,
    engines: Sequence[str] = ENGINES,
    relations: Sequence[str] = plans.RELATIONS,
    command: str = "",
) -> Invariance:
    """Run the same prompts under every condition and hold the logits against each other.

    Args:
        model: MODEL of the command line.
        engines: which of `ENGINES` to start; one that is compared with another one needs that as well.
        relations: which of `plans.RELATIONS` to look at.
        command: the command line, for the report.

    Raises:
        BadInput: a name is unknown, or no engine is left that has any of the relations.
        PilotageError: an engine does not start.
    """
    from pilotage.arch import source

    _known(engines, ENGINES, "--engine")
    _known(relations, plans.RELATIONS, "--relation")
    return _Run(source.resolve(model), relations).all(model, engines, command)


def _known(given: Sequence[str], known: Sequence[str], where: str) -> None:
    for name in given:
        if name not in known:
            raise BadInput(f"nothing is called {name!r}", where=where, do=f"use one of: {'; '.join(known)}")


class _Run:
    """What has been measured so far."""

    def __init__(self, path: Path, relations: Sequence[str]) -> None:
        from pilotage.arch import source
        from pilotage.arch.spec import ArchSpec

        self.path, self.relations = path, relations
        self.spec = ArchSpec.from_hf(source.load_config(str(path)))
        self.thorough = self.spec.hidden_size <= SMALL_HIDDEN
        self.results: list[Result] = []
        self.noise: dict[str, Noise] = {}
        self.seconds: dict[str, float] = {}
        self.receipts: dict[str, Any] = {}
        self.benches: dict[str, Bench] = {}
        self.offline_tokens: dict[str, list[int]] = {}

    def all(self, model: str, engines: Sequence[str], command: str) -> Invariance:
        """Run the engines in the order in which they need each other."""
        for name in ENGINES:
            if name not in engines or (name in PARTNERS and not self._wants(name)):
                continue
            start = time.perf_counter()
            if name in PARTNERS and PARTNERS[name][0] not in self.benches:
                raise BadInput(f"{name!r} is compared with {PARTNERS[name][0]!r}", where="--engine", do="name both")
            if name == SERVER:
                self._server()
            else:
                self._engine(name, engines)
            self.seconds[name] = time.perf_counter() - start
        return Invariance(
            model=model,
            results=self.results,
            noise=self.noise,
            streams={name: bench.streams for name, bench in self.benches.items()},
            receipts=self.receipts,
            seconds=self.seconds,
            command=command,
        )

    def _wants(self, name: str) -> bool:
        own = PARTNERS[name][1]
        return own in self.relations

    def _streams(self, name: str) -> Streams:
        """Return an engine's streams; those of an engine that is compared with another one are that one's."""
        partner = PARTNERS.get(name)
        if partner is not None:
            return self.benches[partner[0]].streams
        return drawn(self.path, settings(self.path, name).sizes)

    def _engine(self, name: str, engines: Sequence[str]) -> None:
        from pilotage.serving.launch import engine

        which, streams = settings(self.path, name), self._streams(name)
        wanted: Sequence[int] = positions(streams, which.sizes, self.spec.vocab_size)
        if name in PARTNERS:
            wanted = self.benches[PARTNERS[name][0]].wanted
        noise = self._noise(which, streams, wanted)
        with engine(self.path, **which.options) as llm:
            # What is drafted is held against the rows of the engine that drafts nothing, and against none of its own.
            reference = self.benches[SHARP].reference if name == DRAFTING else None
            bench = Bench(llm, which, streams, wanted, noise, reference)
            self.benches[name] = bench
            # The sharp engine gets every edge: its steps are cheap, and no fault of addressing hides in its noise.
            found = plans.conditions(which.sizes, streams, thorough=self.thorough and name == SHARP)
            if name == RANKS:
                found = one_of_each(found)
            if name in (UNCOMPILED, DRAFTING):
                found = []
            for plan in track([plan for plan in found if plan.relation in self.relations], name):
                self.results.append(bench.check(plan))
            if name in PARTNERS:
                partner, relation = self.benches[PARTNERS[name][0]], PARTNERS[name][1]
                across = [plans.together(streams, relation)]
                if name == DRAFTING:
                    across = plans.speculations(streams, thorough=self.thorough)
                if name != DRAFTING:
                    self.results.append(bench.judged(bench.plan, bench.reference, relation, partner=partner))
                self.results += [bench.check(plan, partner) for plan in track(across, name)]
            if name == SERVED and SERVER in engines and plans.SERVER in self.relations:
                self.offline_tokens = over_http.offline_tokens(llm)
            self.receipts[name] = llm.collective_rpc("receipt")[0]
            bench.llm = None

    def _noise(self, which: Settings, streams: Streams, wanted: Sequence[int]) -> Noise:
        start = time.perf_counter()
        if which.dtype not in self.noise:
            self.noise[which.dtype] = noises.measure(self.path, which.dtype, as_streams(streams, wanted))
            self.seconds[f"noise of {which.dtype}"] = time.perf_counter() - start
        return self.noise[which.dtype]

    def _server(self) -> None:
        from pilotage.serving.launch import server

        partner = self.benches[SERVED]
        which = settings(self.path, SERVER)
        options = {key: value for key, value in which.options.items() if key != "enforce_eager"}
        with server(self.path, environment=over_http.ENVIRONMENT, **options) as running:
            for plan in (plans.alone(partner.streams), plans.together(partner.streams)):
                found = over_http.run(running, plan.schedule, partner.wanted)
                compared = differences(partner.reference, partner.plan.streams, found, plan.streams)
                self.results.append(
                    judge(
                        compared,
                        partner.noise,
                        relation=plans.SERVER,
                        engine=SERVER,
                        condition=plan.name,
                        names=partner.streams.names,
                        how=which.how(plan),
                    )
                )
            served = over_http.tokens(running, chat="chat" in self.offline_tokens)
        self.results.append(same_tokens(self.offline_tokens, served))


def same_tokens(offline: dict[str, list[int]], served: dict[str, list[int]]) -> Result:
    """Judge whether the server makes the same tokens of a text as the offline engine, by way (completion, chat)."""
    wrong = {
        way: next((i for i, pair in enumerate(zip(ids, served.get(way, []), strict=False)) if pair[0] != pair[1]), None)
        for way, ids in offline.items()
        if served.get(way) != ids
    }
    status = Status.NOT_MEASURED if not offline else Status.FAIL if wrong else Status.PASS
    verdict = Verdict(
        claim="a text becomes the same tokens in the server and offline",
        metric="bitwise",
        estimate=float(len(wrong)),
        bound=0.0,
        bound_source="tokenisation has no noise",
        n=len(offline),
        status=status,
    )
    broke = [
        {
            "prompt": way,
            "position": at if at is not None else min(len(offline[way]), len(served.get(way, []))),
            "expected": "bitwise",
            "offline": offline[way],
            "served": served.get(way),
        }
        for way, at in wrong.items()
    ]
    return Result(relation=plans.SERVER, engine=SERVER, condition="tokens of a text", verdicts=[verdict], broke=broke)


def one_of_each(found: Sequence[Plan]) -> list[Plan]:
    """Keep a few conditions of each relation: for an engine whose steps are dear."""
    kept: dict[str, list[Plan]] = {}
    for plan in found:
        kept.setdefault(plan.relation, []).append(plan)
    return [plan for same in kept.values() for plan in (same[0], same[-1])[: len(same)]]


def as_streams(streams: Streams, wanted: Sequence[int]) -> list[Stream]:
    """Return the streams as arms take them, with the positions that are compared."""
    return [
        Stream(tokens=tokens, prompt=prompt, positions=tuple(p for p in wanted if p < len(tokens) - 1))
        for tokens, prompt in zip(streams.tokens, streams.prompts, strict=True)
    ]
