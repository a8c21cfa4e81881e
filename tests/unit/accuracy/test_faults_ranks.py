"""What is cut and joined around a target in ranks: by what the model itself says is divided."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pilotage.accuracy.arms.tapped import Cached, Handed, Request
from pilotage.accuracy.faults.target import RankedTapped, _share
from pilotage.probe.discovery import SiteInfo

ATTENTION = "model.layers.0.self_attn"
# As two ranks have them: four query heads, one key head that both hold, a latent that is nobody's share.
KNOWN = {
    f"{ATTENTION}.q_rope": SiteInfo(name="q", shape=(2, 3), full_shape=(4, 3), shard_dim=0, num_shards=2),
    f"{ATTENTION}.k_rope": SiteInfo(name="k", shape=(1, 3), full_shape=(1, 3)),
    f"{ATTENTION}.kv_a_layernorm": SiteInfo(name="latent", shape=(5,), full_shape=(5,)),
}
REQUEST = Request(tokens=(1, 2, 3), parts=(2,), kept=(1,))
WHOLE = {
    f"{ATTENTION}.q_rope": torch.arange(24.0).view(2, 4, 3),
    f"{ATTENTION}.k_rope": torch.arange(6.0).view(2, 1, 3),
    f"{ATTENTION}.kv_a_layernorm": torch.arange(10.0).view(2, 5),
    "model.layers.0": torch.ones(2, 7),
}


def ranked(answers: dict[str, list[Any]]) -> RankedTapped:
    asked = SimpleNamespace(pipes=[0, 1], ask=lambda command, *_: answers[command])
    return RankedTapped(cast(Any, asked), None, cast(Any, "somewhere"), torch.float32, 3)


def test_every_rank_is_handed_its_own_and_what_ranks_return_is_whole_again() -> None:
    handed = Handed(rows={site: [rows] for site, rows in WHOLE.items()}, only=frozenset(WHOLE))
    parts = []
    for rank in (0, 1):
        cut = _share(handed, KNOWN, rank, 2)
        assert cut is not None and cut.only == handed.only
        assert cut.rows[f"{ATTENTION}.q_rope"][0].shape == (2, 2, 3)
        assert cut.rows[f"{ATTENTION}.kv_a_layernorm"][0].shape == (2, 5)
        parts.append(cut.rows)
    assert not torch.equal(parts[0][f"{ATTENTION}.q_rope"][0], parts[1][f"{ATTENTION}.q_rope"][0])
    target = ranked({"build": [KNOWN, KNOWN], "observe": parts})
    found = target.observe([REQUEST])
    assert all(torch.equal(found[site][0], rows) for site, rows in WHOLE.items())
    assert _share(None, KNOWN, 0, 2) is None


@pytest.mark.parametrize(("divided", "heads"), [(True, 2), (False, 1)])
def test_pages_are_joined_as_the_keys_in_them_are_divided(divided: bool, heads: int) -> None:
    """Latents, and the one key head of a model, are whole on every rank."""
    site = f"{ATTENTION}.k_rope"
    info = SiteInfo(name="k", shape=(1, 3), full_shape=(2, 3), shard_dim=0, num_shards=2) if divided else KNOWN[site]
    pages = [
        {ATTENTION: Cached(first=[0], keys=[torch.full((2, 1, 3), float(rank))], values=[torch.zeros(2, 1, 3)])}
        for rank in (0, 1)
    ]
    target = ranked({"build": [{site: info}, {site: info}], "cached": pages})
    (found,) = target.cached([REQUEST], Handed(rows={})).values()
    assert found.keys[0].shape == found.values[0].shape == (2, heads, 3)
    assert found.keys[0][0, :, 0].tolist() == list(range(heads))
