"""Invariance on the real engine: clean models hold every relation, and a fault of one condition is found and named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from planted_conditions import FAULTS, Fault

from pilotage.accuracy.faults.fault import Patch
from pilotage.accuracy.faults.table import BY_ID
from pilotage.accuracy.invariance import bench as benches
from pilotage.accuracy.invariance import noise as noises
from pilotage.accuracy.invariance import plans
from pilotage.accuracy.invariance.bench import Bench
from pilotage.accuracy.invariance.judge import Result
from pilotage.accuracy.invariance.run import as_streams
from pilotage.core.nouns import Status
from pilotage.serving import launch
from pilotage.serving.drive import Schedule, drive

pytestmark = pytest.mark.engine

# What is looked at under every planted fault; the clean engine is looked at in full.
SOME = {
    plans.MATES: ("all at once", "one more each step"),
    plans.ORDER: ("reversed",),
    plans.CHUNKS: ("first chunk of 1", "first chunk of 17", "first chunk of 33", "chunks of 9"),
}


class Sharp:
    """One eager fp32 engine for the whole module."""

    def __init__(self, llm: Any, path: Path) -> None:
        self.llm, self.which = llm, benches.settings(path, benches.SHARP)
        self.streams = benches.drawn(path, self.which.sizes)
        self.wanted = benches.positions(self.streams, self.which.sizes, 320)
        self.noise = noises.measure(path, "float32", as_streams(self.streams, self.wanted))

    def bench(self) -> Bench:
        """Compute the reference rows anew, with whatever is planted now."""
        return Bench(self.llm, self.which, self.streams, self.wanted, self.noise)

    def plans(self, few: bool) -> list[plans.Plan]:
        found = plans.conditions(self.which.sizes, self.streams)
        return [p for p in found if not few or p.name in SOME.get(p.relation, (p.name,))]


@pytest.fixture(scope="module")
def sharp(tiny: Callable[..., Path]) -> Iterator[Sharp]:
    path = tiny("gemma3")
    with launch.engine(path, **benches.settings(path, benches.SHARP).options) as llm:
        yield Sharp(llm, path)


def statuses(results: list[Result]) -> dict[str, set[Status]]:
    found: dict[str, set[Status]] = {}
    for result in results:
        found.setdefault(result.relation, set()).add(result.status)
    return found


def test_a_clean_model_holds_every_relation(sharp: Sharp) -> None:
    bench = sharp.bench()
    results = [bench.check(plan) for plan in sharp.plans(few=False)]
    wrong = [(r.relation, r.condition, r.reason, r.broke[:2]) for r in results if r.status is not Status.PASS]
    assert not wrong, wrong
    assert {r.relation for r in results} == set(plans.RELATIONS) - {
        plans.COMPILED,
        plans.PARALLEL,
        plans.SERVER,
        plans.SPECULATION,
    }
    again = next(r for r in results if r.relation == plans.REPETITION)
    assert again.expects == "bitwise" and again.verdicts[0].n > 150
    # A bound from noise that is near the noise: a thousandth of what a fault does.
    assert 1e-6 < (sharp.noise.row_bound or 0) < 2e-5


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_of_one_condition_is_found(fault: Fault, sharp: Sharp, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.plant(monkeypatch)
    bench = sharp.bench()
    wanted = {*fault.breaks, *fault.holds}
    results = [bench.check(plan) for plan in sharp.plans(few=True) if plan.relation in wanted]
    found = statuses(results)
    missed = [relation for relation in fault.breaks if Status.FAIL not in found[relation]]
    alarms = [relation for relation in fault.holds if Status.FAIL in found[relation]]
    assert not missed and not alarms, (missed, alarms)
    for result in results:
        if result.status is Status.FAIL and result.relation in fault.breaks:
            first = result.broke[0]
            assert fault.phase in (None, first["phase"]), first
            assert fault.streams is None or first["prompt"] in fault.streams, first
            assert first["computed"] and first["position"] >= 0


def test_the_failing_condition_runs_again_from_its_json(sharp: Sharp, monkeypatch: pytest.MonkeyPatch) -> None:
    """What localise needs: engine settings and schedule, after a trip through JSON."""
    import json

    next(fault for fault in FAULTS if fault.name.startswith("window")).plant(monkeypatch)
    bench = sharp.bench()
    plan = next(plan for plan in sharp.plans(few=True) if plan.name == "first chunk of 33")
    result = json.loads(json.dumps(bench.check(plan).to_json()))
    assert result["status"] == "fail"
    # The first chunk is right, whatever lies in it; the second one is wrong from its first row on.
    assert result["broke"][0]["position"] == 33
    assert result["broke"][0]["chunk"][0] == 33
    schedule = Schedule.from_json(result["how"]["schedule"])
    assert schedule == plan.schedule
    assert drive(sharp.llm, schedule).steps > 1
    assert result["how"]["engine"]["dtype"] == "float32"


@pytest.fixture(scope="module")
def drafting(tiny: Callable[..., Path]) -> Iterator[tuple[Bench, list[plans.Plan]]]:
    path = tiny("gemma3")
    which = benches.settings(path, benches.DRAFTING)
    streams = benches.drawn(path, which.sizes)
    wanted = benches.positions(streams, which.sizes, 320)
    noise = noises.measure(path, "float32", as_streams(streams, wanted))
    with launch.engine(path, **which.options) as llm:
        yield Bench(llm, which, streams, wanted, noise), plans.speculations(streams)


def test_drafts_change_nothing_on_a_clean_model(drafting: tuple[Bench, list[plans.Plan]]) -> None:
    bench, conditions = drafting
    results = {plan.name: bench.check(plan) for plan in conditions}
    wrong = [(r.condition, r.reason, r.broke[:2]) for r in results.values() if r.status is not Status.PASS]
    assert not wrong, wrong
    # Everything that was accepted came in fewer steps than one a token.
    stood = drive(bench.llm, next(plan for plan in conditions if "stand" in plan.name).schedule)
    fell = drive(bench.llm, next(plan for plan in conditions if plan.name == "all drafts fall").schedule)
    assert stood.drafted and fell.drafted > stood.drafted and stood.steps < fell.steps


@pytest.mark.parametrize(
    ("fault", "broken"),
    [
        ("gemma3-positions-of-drafts-one-late", {"all drafts stand", "the last of three falls"}),
        ("llama3-drafts-that-fell-count-as-computed", {"all drafts fall", "the second of three falls"}),
        ("mistral-a-draft-s-row-sees-the-drafts-after-it", {"all drafts stand"}),
        # A token that is not the forced one is a broken relation, not an error.
        ("llama3-the-first-draft-that-fell-is-kept", {"all drafts fall", "drafts fall in turn, tokens chosen"}),
        # Which row a token is taken from, forced tokens do not show.
        ("mixtral-rows-of-logits-one-too-late-where-drafts-are-verified", {"drafts fall in turn, tokens chosen"}),
    ],
)
def test_a_fault_of_drafts_is_found(fault: str, broken: set[str], drafting: tuple[Bench, list[plans.Plan]]) -> None:
    bench, conditions = drafting
    with Patch() as patch:
        BY_ID[fault].plant(patch)
        found = {plan.name: bench.check(plan) for plan in conditions if plan.name in broken}
    assert {result.status for result in found.values()} == {Status.FAIL}, found
    for result in found.values():
        if result.broke[0]["expected"] == "tokens":
            assert result.broke[0]["token"] != result.broke[0]["due"] and result.broke[0]["prompt"]
