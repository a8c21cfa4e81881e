"""Localisation in the running engine: nothing on clean models; faults of batching, padding, caching and ranks named.

One engine serves all eager cases: faults are planted in its runner and operators while it stands.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import planted_conditions
import pytest
import torch

from pilotage.accuracy.arms.tapped_engine import TappedEngine
from pilotage.accuracy.faults.fault import Patch
from pilotage.accuracy.faults.table import BY_ID
from pilotage.accuracy.invariance import bench as benches
from pilotage.accuracy.invariance import plans
from pilotage.accuracy.localise import Condition, Localisation, localise
from pilotage.core.nouns import Status

pytestmark = pytest.mark.engine

LONGEST = 200


class Standing:
    """An engine that outlives a localisation."""

    def __init__(self, target: TappedEngine) -> None:
        self.target = target

    def __getattr__(self, name: str) -> Any:
        if name == "close":
            raise AttributeError(name)
        return getattr(self.target, name)


def ask(path: Path, target: TappedEngine, condition: Condition) -> Localisation:
    arm = str(target.dtype).removeprefix("torch.")
    return localise(str(path), arms=(arm,), condition=condition, target=lambda *_: Standing(target))


@pytest.fixture(scope="module")
def eager(tiny: Callable[..., Path]) -> Iterator[tuple[Path, TappedEngine]]:
    path = tiny("gemma3")
    with TappedEngine(path, torch.float32, LONGEST, eager=True) as target:
        yield path, target


def kinds(found: Localisation) -> list[str]:
    return list(dict.fromkeys(culprit.kind.removeprefix("model.layers.*.") for culprit in found.culprits))


def test_nothing_is_named_on_a_clean_engine(eager: tuple[Path, TappedEngine]) -> None:
    found = ask(*eager, Condition(engine=True, eager=True))
    assert found.status is Status.PASS, [(culprit.key, culprit.score) for culprit in found.culprits]
    (arm,) = found.arms
    assert arm.target == "engine, eager" and len(arm.sites) > 100
    assert max(site["score"] for site in arm.sites) < 0.9


@pytest.mark.parametrize(
    ("plant", "first"),
    [
        (planted_conditions.wrong_slot_of_the_second, "self_attn.kv"),
        (planted_conditions.a_padded_decode_forgets_a_key, "self_attn.heads"),
        (planted_conditions.decode_window_one_longer, "self_attn.heads"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_faults_of_a_batch_are_named(
    plant: planted_conditions.Plant, first: str, eager: tuple[Path, TappedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    found = ask(*eager, Condition(engine=True, eager=True))
    assert found.status is Status.FAIL
    assert kinds(found)[0] == first
    assert set(kinds(found)) <= {"self_attn.kv", "self_attn.heads"}
    (arm,) = found.arms
    assert arm.causal is not None and arm.causal["all_restore"]


@pytest.fixture(scope="module")
def drafting(tiny: Callable[..., Path]) -> Iterator[tuple[Path, TappedEngine, Condition]]:
    """The condition in which drafts fall in turn, as invariance writes it down."""
    path = tiny("gemma3")
    which = benches.settings(path, benches.DRAFTING)
    found = plans.speculations(benches.drawn(path, which.sizes))
    turns = next(plan for plan in found if plan.name == "drafts fall in turn")
    condition = Condition.from_json(json.loads(json.dumps(which.how(turns))))
    longest = max(len(request.tokens) for request in turns.schedule.requests)
    how = {"eager": True, "options": condition.options, "schedule": condition.schedule}
    with TappedEngine(path, torch.float32, longest, **how) as target:
        yield path, target, condition


def test_a_clean_engine_that_drafts_is_none(drafting: tuple[Path, TappedEngine, Condition]) -> None:
    path, target, condition = drafting
    target.missteps.clear()
    found = ask(path, target, condition)
    assert found.status is Status.PASS, [(culprit.key, culprit.score) for culprit in found.culprits]
    assert any(request.drafts for request in found.requests)
    # Rows of drafts that fell are nobody's: they were computed, and no reference was handed to them.
    (receipt,) = target._engine().collective_rpc("receipt")
    assert receipt["replacement"]["rows"]["drafts"] > 10


@pytest.mark.parametrize(
    ("fault", "first"),
    [
        ("qwen3-keys-of-a-draft-that-fell-stay-and-are-read", "model.layers.0.self_attn.kv"),
        pytest.param(
            "gemma3-positions-of-drafts-one-late", "model.layers.0.self_attn.[qk]_rope", marks=pytest.mark.slow
        ),
        pytest.param("llama3-drafts-that-fell-count-as-computed", "runner.inputs", marks=pytest.mark.slow),
        ("qwen2-token-after-the-drafts-from-the-row-before", "sampler.tokens"),
    ],
)
def test_faults_of_drafts_are_named(fault: str, first: str, drafting: tuple[Path, TappedEngine, Condition]) -> None:
    path, target, condition = drafting
    target.missteps.clear()
    with Patch() as patch:
        BY_ID[fault].plant(patch)
        found = ask(path, target, condition)
    assert found.status is Status.FAIL and fnmatch(found.culprits[0].key, first), found.summary()
    assert json.loads(json.dumps(found.to_json()))["culprits"][0]["what"]


@pytest.mark.slow
def test_a_condition_that_invariance_found(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks alone show it, and the condition says which; without it nothing is found."""
    path = tiny("gemma3")
    which = benches.settings(path, benches.SHARP)
    streams = benches.drawn(path, which.sizes)
    cut = next(plan for plan in plans.conditions(which.sizes, streams) if plan.name == "first chunk of 33")
    condition = Condition.from_json(which.how(cut))
    planted_conditions.a_chunk_that_starts_inside_a_page_begins_it_anew(monkeypatch)
    found = localise(str(path), arms=("float32",), condition=condition)
    assert kinds(found) == ["self_attn.kv", "self_attn.heads"]
    whole = localise(str(path), arms=("float32",), condition=Condition(engine=True, eager=True))
    assert whole.status is Status.PASS


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.distributed)])
def test_the_compiled_engine(tiny: Callable[..., Path], tmp_path: Path, ranks: int) -> None:
    import shutil

    path = tiny("gemma3")
    clean = localise(str(path), condition=Condition(engine=True, ranks=ranks))
    assert clean.status is Status.PASS, [(culprit.key, culprit.score) for culprit in clean.culprits]
    assert [arm.target for arm in clean.arms] == ["engine, compiled" + (", 2 ranks" if ranks == 2 else "")] * 2
    wrong = tmp_path / "wrong"
    shutil.copytree(path, wrong)
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps({**config, "sliding_window": 17}))
    found = localise(str(wrong), reference=str(path), arms=("bfloat16",), condition=Condition(engine=True, ranks=ranks))
    assert kinds(found) == ["self_attn.heads"]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_fault_of_one_rank(tiny: Callable[..., Path]) -> None:
    import cloudpickle

    cloudpickle.register_pickle_by_value(planted_conditions)  # the workers have no such module
    path = tiny("gemma3")
    condition = Condition(engine=True, eager=True, ranks=2)
    for dtype in (torch.bfloat16, torch.float32):
        with TappedEngine(path, dtype, LONGEST, eager=True, ranks=2) as target:
            clean = ask(path, target, condition)
            assert clean.status is Status.PASS, [(culprit.key, culprit.score) for culprit in clean.culprits]
            assert clean.arms[0].target == "engine, eager, 2 ranks"
            if dtype is torch.float32:
                target._engine().collective_rpc(planted_conditions.wrong_share_of_the_second_rank)
                found = ask(path, target, condition)
                assert kinds(found) == ["self_attn.o_proj"]
                assert found.culprits[0].layers == list(range(6))
