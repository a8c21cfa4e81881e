"""A fault of one rank, on two real ranks: clean they agree with one rank, and what is planted breaks what it should."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import cloudpickle
import planted_conditions
import pytest

from pilotage.accuracy.invariance import bench as benches
from pilotage.accuracy.invariance import noise as noises
from pilotage.accuracy.invariance import plans, rows
from pilotage.accuracy.invariance.bench import Bench
from pilotage.accuracy.invariance.judge import Result, judge
from pilotage.accuracy.invariance.run import as_streams
from pilotage.core.nouns import Status
from pilotage.serving import launch

pytestmark = [pytest.mark.engine, pytest.mark.distributed, pytest.mark.slow]


def test_faults_of_one_rank_are_found(tiny: Callable[..., Path]) -> None:
    cloudpickle.register_pickle_by_value(planted_conditions)  # the workers have no such module
    path = tiny("gemma3")
    one, two = benches.settings(path, benches.SHARP), benches.settings(path, benches.RANKS)
    streams = benches.drawn(path, one.sizes)
    wanted = benches.positions(streams, one.sizes, 320)
    noise = noises.measure(path, "float32", as_streams(streams, wanted))
    with launch.engine(path, **one.options) as llm:
        reference = Bench(llm, one, streams, wanted, noise)

    def across(bench: Bench) -> Result:
        found = rows.differences(
            reference.reference, reference.plan.streams, bench.reference, bench.plan.streams, same_engine=False
        )
        names = bench.streams.names
        return judge(found, noise, relation=plans.PARALLEL, engine=two.name, condition="alone", names=names)

    with launch.engine(path, **{**two.options, "enforce_eager": True}) as llm:

        def bench() -> Bench:
            return Bench(llm, two, streams, wanted, noise)

        cut = next(plan for plan in plans.conditions(two.sizes, streams) if plan.name == "first chunk of 33")
        clean = bench()
        assert across(clean).status is Status.PASS
        assert clean.check(cut).status is Status.PASS
        assert sorted(llm.collective_rpc(planted_conditions.on_the_second_rank)) == [0, 1]
        faulty = bench()
        found = faulty.check(cut)
        assert found.status is Status.FAIL and found.broke[0]["position"] >= 33
        # One request alone, in one chunk, does not show it.
        assert across(faulty).status is Status.PASS
        llm.collective_rpc(planted_conditions.wrong_share_of_the_second_rank)
        assert across(bench()).status is Status.FAIL
