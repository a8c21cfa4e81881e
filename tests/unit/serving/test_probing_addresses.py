"""Where a tapped row belongs: from what was scheduled, whatever the graph's own inputs say."""

from __future__ import annotations

from types import SimpleNamespace

from pilotage.serving.batch import Forward
from pilotage.serving.probing import _addresses, _owners


def test_rows_are_addressed_by_what_was_scheduled() -> None:
    forward = Forward(kind="decode", rows=(4, 0, 2), num_tokens=(3, 1, 2))
    states = {"a": SimpleNamespace(num_computed_tokens=7), "b": SimpleNamespace(num_computed_tokens=0),
              "c": SimpleNamespace(num_computed_tokens=30)}  # fmt: skip
    assert _owners(forward).tolist() == [0, 0, 0, 1, 2, 2]
    assert _addresses(forward, ["a", "b", "c"], states).tolist() == [7, 8, 9, 0, 30, 31]
