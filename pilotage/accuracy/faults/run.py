"""Plant every fault, run every clean case, and keep what each check said. Resumable: a case is one file."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

import pilotage.functional as NF
from pilotage.accuracy.arms.tapped import PagedTapped
from pilotage.accuracy.encoding import Encoder, encoding_verdict
from pilotage.accuracy.faults import training
from pilotage.accuracy.faults.bench import ARMS, Bench, failures
from pilotage.accuracy.faults.cases import KERNELS, Clean
from pilotage.accuracy.faults.fault import Fault, Patch
from pilotage.accuracy.faults.report import Report
from pilotage.accuracy.faults.table import FAULTS
from pilotage.accuracy.faults.target import RankedTapped, Ranks, ServedEncoder, rows_of
from pilotage.accuracy.localise import localise
from pilotage.accuracy.localise.run import Condition, Localisation
from pilotage.core import store
from pilotage.core.errors import BadInput
from pilotage.core.nouns import Status
from pilotage.core.progress import track

# Kept results of another recipe are measured again.
RECIPE = 3
# Small, so that the longer prompts come in chunks.
_BUCKETS = {"num_batched_tokens_buckets": [32, 64], "num_seqs_buckets": [1, 8]}


class Runner:
    """Runs cases, keeping benches between those of one checkpoint.

    Args:
        out: directory of the kept results.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self._bench: Bench | None = None
        self._ranks: Ranks | None = None
        self._trained: dict[str, Any] = {}

    def close(self) -> None:
        """End the tensor-parallel processes, if there are any."""
        if self._ranks is not None:
            self._ranks.close()

    def bench(self, model: str) -> Bench:
        """Return the bench of a checkpoint; the last one is kept."""
        if self._bench is None or self._bench.model != model:
            self._bench = Bench(model)
        return self._bench

    def kept(self, kind: str, name: str) -> dict[str, Any] | None:
        """Return the result of an earlier run of a case, if it is of this recipe."""
        path = self.out / kind / f"{name}.json"
        if not path.is_file():
            return None
        with contextlib.suppress(BadInput, TypeError, AttributeError):
            found = store.read_json(path)
            if found.get("recipe") == RECIPE:
                return dict(found)
        return None

    def keep(self, kind: str, result: dict[str, Any]) -> dict[str, Any]:
        """Write a case's result."""
        store.write_json(self.out / kind / f"{result['id']}.json", result | {"recipe": RECIPE})
        return result

    def fault(self, fault: Fault) -> dict[str, Any]:
        """Plant a fault, ask every check, and say what each found."""
        start = time.perf_counter()
        result = {
            "id": fault.id, "name": fault.name, "heading": fault.heading, "model": fault.model, "only": fault.only,
            "fp32": fault.fp32, "ranks": fault.ranks, "where": list(fault.where),
        }  # fmt: skip
        ways = {"tokenizer": self._tokens, "drafts": self._drafts, "model": self._model, "training": self._training}
        ask = ways[fault.subject]
        found = ask(fault)
        return result | {"seconds": round(time.perf_counter() - start, 1)} | found

    def engine(self, fault: Fault) -> dict[str, Any]:
        """Plant a fault under the real engine, in this process and not compiled, and judge the logits.

        In fp32; the serving dtype is asked about what that does not find.
        """
        from pilotage.accuracy.arms.engine import EngineArm

        start = time.perf_counter()
        bench = self.bench(fault.model)
        arms: dict[str, Any] = {}
        for arm in ("float32", "bfloat16"):
            bench.side(arm)
            with Patch() as patch:
                fault.plant(patch)
                served = EngineArm(bench.path, arm, enforce_eager=True, options={"additional_config": _BUCKETS})
                found = served.observe(bench.truth.streams)
            arms[arm] = failures(bench.compare(arm, torch.cat(list(found.logits))))
            if arms[arm]:
                break
        by = [arm for arm, failed in arms.items() if failed]
        return {
            "id": fault.id, "name": fault.name, "heading": fault.heading, "model": fault.model, "only": fault.only,
            "fp32": fault.fp32, "detected": bool(by), "detected_by": by, "arms": arms,
            "seconds": round(time.perf_counter() - start, 1),
        }  # fmt: skip

    def _training(self, fault: Fault) -> dict[str, Any]:
        """Examine training with a fault planted; all such faults at once, for their processes take longest to start."""
        if fault.id not in self._trained:
            self._trained = training.measure([one for one in FAULTS if one.subject == "training"])
        return training.result(fault, self._trained[fault.id])

    def _tokens(self, fault: Fault) -> dict[str, Any]:
        bench = self.bench(fault.model)
        with Patch() as patch:
            fault.plant(patch)
            verdict = encoding_verdict(ServedEncoder(bench.path), Encoder(bench.path))
        detected = verdict.status is Status.FAIL
        culprits = [{"module": "tokenizer", "site": "ids", "key": "tokenizer"}] if detected else []
        named = any(fault.names(culprit["module"]) for culprit in culprits)
        by = ["token ids"] if detected else []
        return {
            "detected": detected, "detected_by": by, "arms": {}, "culprits": culprits, "named_first": named,
            "named": named, "peers": {},
        }  # fmt: skip

    def _drafts(self, fault: Fault) -> dict[str, Any]:
        """Ask `pilotage invariance` whether drafts change anything, and localise under the condition that it breaks."""
        from pilotage.accuracy.invariance import bench, invariance, plans

        model = f"tiny:{fault.model}"
        with Patch() as patch:
            fault.plant(patch)
            result = invariance(model, engines=(bench.SHARP, bench.DRAFTING), relations=(plans.SPECULATION,))
            broken = [found for found in result.broken if found.relation == plans.SPECULATION]
            culprits: list[dict[str, Any]] = []
            if broken:
                condition = Condition.from_json(broken[0].to_json()["how"])
                culprits = _told(localise(model, arms=("float32",), condition=condition))
        return {
            "detected": bool(broken),
            "detected_by": ["invariance"] if broken else [],
            "arms": {},
            "conditions": [found.condition for found in broken],
            "culprits": culprits[:8],
            "named_first": bool(culprits) and _right(fault, culprits[0]),
            "named": any(_right(fault, culprit) for culprit in culprits),
            "peers": {},
        }

    def _model(self, fault: Fault) -> dict[str, Any]:
        bench = self.bench(fault.model)
        for arm in ARMS:
            bench.side(arm)  # measured while nothing is planted
        arms: dict[str, Any] = {}
        by: list[str] = []
        peers: dict[str, bool] = {}
        with Patch() as patch:
            if fault.ranks == 1:
                fault.plant(patch)
            for arm in ARMS:
                rows = rows_of(self._target(fault, bench, arm), bench.requests)
                arms[arm] = failures(bench.compare(arm, rows))
                by += [arm] if arms[arm] else []
                if arm == "bfloat16":
                    peers = bench.peers(rows)
            modules = [] if by or fault.ranks > 1 else bench.failing_modules()
            by += ["modules"] if modules else []
            # The serving dtype is asked where fp32 has nothing to show.
            chosen = ("float32",) if arms["float32"] else ("bfloat16",) if arms["bfloat16"] else ARMS
            culprits = self._culprits(fault, bench, chosen) if by else []
        return {
            "detected": bool(by),
            "detected_by": by,
            "arms": arms,
            "modules": modules[:5],
            "culprits": culprits[:8],
            "named_first": bool(culprits) and _right(fault, culprits[0]),
            "named": any(_right(fault, culprit) for culprit in culprits),
            "peers": peers,
        }

    def _target(self, fault: Fault, bench: Bench, arm: str) -> Any:
        dtype = getattr(torch, arm)
        if fault.ranks == 1:
            return PagedTapped(bench.path, dtype, bench.longest)
        return RankedTapped(self.ranks(fault.ranks), fault.id, bench.path, dtype, bench.longest)

    def ranks(self, count: int) -> Ranks:
        """Start the tensor-parallel processes, once."""
        if self._ranks is None or not self._ranks.processes:
            self._ranks = Ranks(count)
        return self._ranks

    def _culprits(self, fault: Fault, bench: Bench, arms: Sequence[str]) -> list[dict[str, Any]]:
        target = None
        if fault.ranks > 1:

            def target(path: Path, dtype: torch.dtype, longest: int) -> Any:
                return RankedTapped(self.ranks(fault.ranks), fault.id, path, dtype, longest)

        condition = Condition(ranks=fault.ranks)
        return _told(localise(str(bench.path), arms=arms, target=target, condition=condition, known=bench.known))

    def clean(self, case: Clean) -> dict[str, Any]:
        """Run a clean case; anything that is not a pass is an alarm."""
        start = time.perf_counter()
        bench = self.bench(f"{case.model}@{case.seed}")
        alarms: list[str] = []
        peers: dict[str, bool] = {}
        largest: dict[str, Any] = {}
        for arm in ARMS:
            bench.side(arm)
            target = PagedTapped(bench.path, getattr(torch, arm), bench.longest)
            if case.kernels == "projections not packed":
                _unpack(target.model)
            with NF.forced(KERNELS[case.kernels]):
                rows = rows_of(target, bench.requests)
            alarms += [f"{arm}: {metric}" for metric in failures(bench.compare(arm, rows))]
            if arm == "bfloat16":
                peers = bench.peers(rows)
        if case.localised:
            with NF.forced(KERNELS[case.kernels]):
                found = localise(str(bench.path), arms=ARMS, known=bench.known)
                modules = bench.failing_modules()
            alarms += [f"module: {module}" for module in modules]
            alarms += [f"localise: {culprit.key}" for culprit in found.culprits]
            if found.status is Status.NOT_MEASURED:
                alarms.append("localise: not measured")
            largest = _largest(found)
        return {
            "id": case.id, "model": case.model, "seed": case.seed, "kernels": case.kernels,
            "localised": case.localised, "alarms": alarms, "peers": peers, "largest": largest,
            "seconds": round(time.perf_counter() - start, 1),
        }  # fmt: skip


def _told(found: Localisation) -> list[dict[str, Any]]:
    return [
        {"module": c.module, "site": c.site, "key": c.key, "score": round(c.score, 3), "what": c.what}
        for c in found.culprits
    ]


def _largest(found: Localisation) -> dict[str, dict[str, float]]:
    """Return arm -> statistic -> the largest value that a site has, over its bound."""
    said: dict[str, dict[str, float]] = {}
    for arm in found.arms:
        for site in arm.sites:
            for name, value in site["statistics"].items():
                kind = name.split("_")[0]
                over = round(value / site["bounds"][name], 3)
                said.setdefault(arm.arm, {})[kind] = max(said.get(arm.arm, {}).get(kind, 0.0), over)
    return said


def _right(fault: Fault, culprit: dict[str, Any]) -> bool:
    return fault.names(culprit["key"]) or fault.names(culprit["module"])


def _unpack(model: Any) -> None:
    from pilotage.nn import unpack

    for module in model.modules():
        if module.__dict__.get("packed") is not None:
            unpack(module)


def measure(
    out: Path,
    *,
    faults: Sequence[Fault] = FAULTS,
    clean: Sequence[Clean] = (),
    only: str | None = None,
    again: bool = False,
    engine: bool = False,
) -> Report:
    """Run cases that have no kept result, and report on all of them.

    Args:
        out: directory of the results; a run that was stopped goes on where it was.
        faults: to plant.
        clean: clean runs.
        only: pattern of case names.
        again: measure again what is there.
        engine: plant the faults under the real engine instead, and ask whether they are found.

    Raises:
        BadInput: the pattern means no case.
    """
    chosen = [fault for fault in faults if only is None or fnmatchcase(fault.id, only)]
    cases = [case for case in clean if only is None or fnmatchcase(case.id, only)]
    if not chosen and not cases:
        raise BadInput(f"{only!r} means no case", where="--only", do="name a model or a word of a fault: '*rope*'")
    runner = Runner(out)
    report = Report()
    try:
        # Those of one checkpoint together: its reference and controls are measured once.
        if engine:
            # Workers of several ranks are processes of their own, and tokens are made before the engine.
            possible = [f for f in chosen if f.ranks == 1 and f.subject == "model"]
            for fault in track(sorted(possible, key=lambda f: f.model), "planted faults, engine"):
                kept = None if again else runner.kept("engine", fault.id)
                report.engine.append(kept or runner.keep("engine", runner.engine(fault)))
            return report
        for fault in track(sorted(chosen, key=lambda f: (f.ranks, f.model)), "planted faults"):
            kept = None if again else runner.kept("faults", fault.id)
            report.faults.append(kept or runner.keep("faults", runner.fault(fault)))
        for case in track(sorted(cases, key=lambda c: (c.model, c.seed)), "clean runs"):
            kept = None if again else runner.kept("clean", case.id)
            report.clean.append(kept or runner.keep("clean", runner.clean(case)))
    finally:
        runner.close()
    order = {fault.id: index for index, fault in enumerate(FAULTS)}
    report.faults.sort(key=lambda found: order.get(found["id"], 0))
    return report


def kept_report(out: Path) -> Report:
    """Read the results of an earlier run.

    Raises:
        BadInput: there are none.
    """
    runner = Runner(out)
    faults = _read(runner, "faults", (fault.id for fault in FAULTS))
    clean = _read(runner, "clean", (path.stem for path in sorted((out / "clean").glob("*.json"))))
    if not faults and not clean:
        raise BadInput("no results here", where=str(out), do="run `pilotage faults` first")
    return Report(faults=faults, clean=clean, engine=_read(runner, "engine", (fault.id for fault in FAULTS)))


def _read(runner: Runner, kind: str, names: Iterable[str]) -> list[dict[str, Any]]:
    return [found for name in names if (found := runner.kept(kind, name)) is not None]
