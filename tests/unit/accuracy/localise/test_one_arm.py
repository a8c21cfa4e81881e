"""One arm of a localisation, on rows that are made up: what a site is held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from pilotage.accuracy.arms import engine
from pilotage.accuracy.arms.tapped import Handed, Request
from pilotage.accuracy.arms.tapped_engine import TappedEngine
from pilotage.accuracy.localise import score
from pilotage.accuracy.localise.arm import Bench
from pilotage.accuracy.localise.run import Condition

ROWS, WIDTH = 90, 32
REQUEST = Request(tokens=tuple(range(ROWS + 1)), parts=(ROWS - 10,), kept=(0,))
EXPECTED = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
ROUTER, EMBEDDING = "model.layers.0.mlp.router", "model.embed_tokens"


def judged(
    site: str,
    rows: Tensor,
    home: Tensor,
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
    looked_up: Mapping[str, Tensor] | None = None,
    missing: Sequence[Tensor] = (),
) -> dict[str, Any]:
    """Judge the rows of a site in the bf16 arm, whose controls all have `home`."""
    model = SimpleNamespace(names=lambda tokens: [site])
    known = SimpleNamespace(models=lambda arm: (model, model))
    target = SimpleNamespace(names=lambda tokens: [site], missing=missing)
    bench = Bench("bfloat16", [REQUEST], cast(Any, known), cast(Any, target), 1)
    bench.side = cast(Any, SimpleNamespace(dtypes=dtypes or {}, looked_up=looked_up or {}))
    table: list[dict[str, Any]] = []
    findings: list[Any] = []
    bench._judge(site, [rows], EXPECTED, [score.measure(home, EXPECTED)] * 2, table, findings)
    assert len(findings) == (table[0]["status"] == "fail")
    return table[0]


def test_what_hugging_face_computes_in_fp32_is_held_to_fp32_in_the_bf16_arm() -> None:
    """A router whose logits are rounded to bf16 lies under the floors of bf16, whatever the controls do."""
    rounded = EXPECTED.bfloat16().float()
    inside = EXPECTED * (1 + 2.0**-24)
    assert judged(ROUTER, rounded, EXPECTED)["status"] == "pass"
    assert judged(ROUTER, rounded, EXPECTED, dtypes={ROUTER: torch.float32})["status"] == "fail"
    assert judged(ROUTER, inside, EXPECTED, dtypes={ROUTER: torch.float32})["status"] == "pass"


def test_a_look_up_is_held_to_the_bit_where_it_was_computed() -> None:
    """A scale that is not rounded first, as an embedding's: nearer to the truth, and not the model."""
    table = (EXPECTED / 7.75).bfloat16()
    home = table * torch.tensor(7.75, dtype=torch.bfloat16)
    other = (table.float() * 60**0.5).bfloat16()
    looked_up = {EMBEDDING: home}
    right = judged(EMBEDDING, home, home, looked_up=looked_up)
    assert right["status"] == "pass" and right["statistics"]["unlike"] == 0
    wrong = judged(EMBEDDING, other, home, looked_up=looked_up)
    assert wrong["status"] == "fail" and wrong["statistics"]["unlike"] > 10
    # Rows that were found in a cache are nobody's.
    lost = torch.zeros(ROWS, dtype=torch.bool)
    lost[:40] = True
    holes = home.clone()
    holes[:40] = float("nan")
    assert judged(EMBEDDING, holes, home, looked_up=looked_up, missing=[lost])["status"] == "pass"


def test_pages_are_cut_where_the_request_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """With drafts the last step computes more than the request takes; with a window the first pages are gone."""
    target = TappedEngine.__new__(TappedEngine)
    requests = [
        Request(tokens=tuple(range(12)), parts=(9,), kept=(0,)),
        Request(tokens=(1, 2, 3), parts=(2,), kept=(0,)),
    ]
    keys = torch.arange(14.0)[:, None, None].expand(14, 2, 3)

    def kept(count: int, first: int) -> Any:
        return SimpleNamespace(
            layer="layers.0.self_attn", first=first, keys=keys[first:count], values=-keys[first:count]
        )

    monkeypatch.setattr(engine, "read_kv", lambda found, count: [[kept(14, 4)], [kept(5, 3)]])
    monkeypatch.setattr(
        target, "_engine", lambda: SimpleNamespace(collective_rpc=lambda name, args=(): []), raising=False
    )
    monkeypatch.setattr(target, "_hand", lambda *_: None, raising=False)
    monkeypatch.setattr(target, "_drive", lambda *_: [], raising=False)
    (found,) = target.cached(requests, Handed(rows={})).values()
    assert list(found.first) == [4, 2]  # no request has positions behind its last
    assert [len(rows) for rows in found.keys] == [11 - 4, 0] == [len(rows) for rows in found.values]
    assert found.keys[0][:, 0, 0].tolist() == list(range(4, 11))


def test_a_condition_finds_prefixes_where_invariance_did() -> None:
    """What the broken condition found in the cache is to be found again; everything else is as it was."""
    schedule = {"requests": [], "steps": [24]}
    options = {"dtype": "float32", "enforce_eager": True, "tensor_parallel_size": 2, "max_num_seqs": 6}
    condition = Condition.from_json({"engine": options, "schedule": schedule, "streams": [0]})
    assert (condition.engine, condition.eager, condition.ranks) == (True, True, 2)
    assert condition.options == {"enable_prefix_caching": True, "max_num_seqs": 6}
    off = Condition.from_json({"engine": {"enable_prefix_caching": False}, "schedule": schedule})
    assert off.options == {"enable_prefix_caching": False}
    # Without a condition a hit would leave rows uncomputed.
    assert "enable_prefix_caching" not in Condition(engine=True).options
