"""What counts as the same way, and what breaks a relation."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from pilotage.accuracy.invariance import noise as noises
from pilotage.accuracy.invariance import plans
from pilotage.accuracy.invariance.judge import judge
from pilotage.accuracy.invariance.noise import Noise
from pilotage.accuracy.invariance.result import Invariance
from pilotage.accuracy.invariance.rows import Rows, Way, differences, relative
from pilotage.accuracy.invariance.run import same_tokens
from pilotage.core.nouns import Status

WHOLE = {position: Way("prefill", 16, 0, 0, 8) for position in range(8)}
DECODED = {8: Way("decode", 4, 0, 8, 1), 9: Way("decode", 4, 0, 9, 1)}
VALUES = [1e-6, 1.1e-6, 1.2e-6, 0.9e-6, 1.3e-6, 1.0e-6, 1.15e-6, 1.05e-6]
NOISE = Noise(
    dtype="float32",
    row={f"v{i}": 3 * value for i, value in enumerate(VALUES)},
    pooled={f"v{i}": value for i, value in enumerate(VALUES)},
    missing={},
    rows=100,
)


def rows(
    ways: dict[int, dict[int, Way]], *, noise: float = 0.0, wrong: dict[tuple[int, int], float] | None = None
) -> Rows:
    logits = {}
    for request, found in ways.items():
        for position in found:
            generator = torch.Generator().manual_seed(position)
            row = torch.randn(50, generator=generator)
            size = (wrong or {}).get((request, position), noise)
            logits[request, position] = row if not size else row * (1 + size)
    return Rows(logits=logits, ways=ways)


def check(first: Rows, second: Rows, **how: Any) -> Any:
    found = differences(first, (0,), second, (0,) * len(second.ways), **how)
    return judge(found, NOISE, relation=plans.CHUNKS, engine="e", condition="c", names=["longest"])


def test_the_same_way_must_be_bitwise() -> None:
    reference = rows({0: {**WHOLE, **DECODED}})
    clean = check(reference, rows({0: {**WHOLE, **DECODED}}))
    assert clean.status is Status.PASS and clean.expects == "bitwise" and clean.verdicts[0].n == 10
    off = check(reference, rows({0: {**WHOLE, **DECODED}}, wrong={(0, 9): 1e-7}))
    assert off.status is Status.FAIL
    assert [(row["position"], row["phase"], row["expected"]) for row in off.broke] == [(9, "decode", "bitwise")]


def test_another_way_is_held_against_the_noise_and_so_is_all_that_follows_it() -> None:
    reference = rows({0: {**WHOLE, **DECODED}})
    cut = {**{p: Way("prefill", 16, 0, 0, 5) for p in range(5)}, **{p: Way("prefill", 16, 0, 5, 3) for p in (5, 6, 7)}}
    clean = check(reference, rows({0: {**cut, **DECODED}}, noise=3e-6))
    assert clean.status is Status.PASS and clean.expects == "bounded" and clean.verdicts[0].n == 10
    assert clean.verdicts[0].bound is not None and 3.9e-6 < clean.verdicts[0].bound < 1.2e-5
    broken = check(reference, rows({0: {**cut, **DECODED}}, noise=1e-6, wrong={(0, 6): 1e-3, (0, 9): 1e-4}))
    assert broken.status is Status.FAIL
    assert [row["position"] for row in broken.broke] == [6, 9]
    assert broken.broke[0]["chunk"] == [5, 3] and broken.broke[0]["graph"] == "prefill-16"
    assert broken.broke[0]["computed"] == "tokens 5 to 7 at 0 of the prefill graph of 16"


def test_what_is_not_finite_fails() -> None:
    reference = rows({0: dict(WHOLE)})
    found = check(reference, rows({0: {p: Way("prefill", 32, 0, 0, 8) for p in range(8)}}, wrong={(0, 3): math.nan}))
    assert found.status is Status.FAIL and found.broke[0]["difference"] is None
    json.dumps(found.to_json(), allow_nan=False)
    assert relative(torch.tensor([math.inf, 1.0]), torch.ones(2)) == math.inf


def test_rows_of_the_prefix_cache_are_as_good_as_who_wrote_them() -> None:
    reference = rows({0: {**WHOLE, **DECODED}})
    rest = {p: Way("prefill", 16, 0, 4, 4) for p in range(4, 8)}
    # The second request computes the second half; the first half is the first request's.
    second = rows({0: {**WHOLE}, 1: rest})
    found = differences(reference, (0,), second, (0, 0), inherits=(None, 0))
    assert [row.same_way for row in found if row.request == 1] == [False] * 4
    cut = {**{p: Way("prefill", 16, 0, 0, 4) for p in range(4)}, **rest}
    found = differences(rows({0: cut}), (0,), rows({0: cut, 1: rest}), (0, 0), inherits=(None, 0))
    assert all(row.same_way for row in found) and len(found) == 12
    found = differences(rows({0: cut}), (0,), rows({0: cut, 1: rest}), (0, 0))
    assert [row.same_way for row in found if row.request == 1] == [False] * 4


def test_another_engine_is_never_the_same_way() -> None:
    reference = rows({0: dict(WHOLE)})
    found = differences(reference, (0,), rows({0: dict(WHOLE)}), (0,), same_engine=False)
    assert not any(row.same_way for row in found)


def test_nothing_in_common_is_not_measured() -> None:
    found = check(rows({0: dict(WHOLE)}), rows({0: dict(DECODED)}))
    assert found.status is Status.NOT_MEASURED


def test_too_few_clean_variants_give_no_bound() -> None:
    few = Noise(dtype="float32", row={"a": 1e-6}, pooled={"a": 1e-6}, missing={}, rows=3)
    other = rows({0: {p: Way("prefill", 32, 0, 0, 8) for p in range(8)}}, noise=1e-7)
    found = differences(rows({0: dict(WHOLE)}), (0,), other, (0,))
    result = judge(found, few, relation=plans.CHUNKS, engine="e", condition="c", names=["longest"])
    assert result.status is Status.NOT_MEASURED


def test_tokens_of_server_and_offline() -> None:
    same = {"completion": [2, 5, 7], "chat": [2, 9]}
    assert same_tokens(same, dict(same)).status is Status.PASS
    twice = same_tokens(same, {"completion": [2, 5, 7], "chat": [2, 2, 9]})
    assert twice.status is Status.FAIL and twice.broke[0]["prompt"] == "chat" and twice.broke[0]["position"] == 1
    assert same_tokens({}, {}).status is Status.NOT_MEASURED


def test_what_the_engine_does_not_have_is_listed_and_not_counted() -> None:
    from pilotage.accuracy.invariance.bench import unmeasured

    clean = check(rows({0: dict(WHOLE)}), rows({0: dict(WHOLE)}))
    missing = unmeasured(plans.SPECULATION, "e", "draft tokens", "the engine has none", counted=False)
    whole = Invariance(model="m", results=[clean, missing], noise={"float32": NOISE}, streams={})
    assert whole.status is Status.PASS
    assert whole.matrix()[plans.SPECULATION] == {"e": Status.NOT_MEASURED}
    assert Invariance(model="m", results=[missing], noise={}, streams={}).status is Status.NOT_MEASURED


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_noise_is_measured_on_hugging_face(
    name: str, tiny: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pilotage.accuracy.arms.base import Stream

    monkeypatch.setenv("PILOTAGE_HOME", str(tmp_path))
    tokens = tuple(torch.randint(5, 300, (46,), generator=torch.Generator().manual_seed(1)).tolist())
    streams = [Stream(tokens=tokens, prompt=40, positions=tuple(range(45)))]
    found = noises.measure(tiny(name), "float32", streams)
    assert not found.missing and len(found.row) == len(noises.VARIANTS) and found.rows == 45
    # A chunk that holds the whole prompt changes nothing.
    assert all(0 < value < 2e-5 for name, value in found.row.items() if name != "chunks of 64")
    assert found.row_bound is not None and max(found.row.values()) < found.row_bound < 10 * max(found.row.values())
    kept = list((tmp_path / "noise").iterdir())
    assert len(kept) == 1 and noises.measure(tiny(name), "float32", streams) == found
