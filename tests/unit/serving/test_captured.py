"""Rows of drafts that fell are cut from a step before it is written."""

from __future__ import annotations

import torch

from pilotage.serving.captured import Captured


def test_tokens_at_or_after_the_end_of_their_request_are_dropped() -> None:
    step = Captured(
        rows={"all": torch.arange(12.0).view(6, 2), "head": torch.arange(4.0)},
        requests=["a", "a", "a", "b", "b", "gone"],
        positions=torch.tensor([4, 5, 6, 0, 1, 9]),
        tokens=torch.tensor([40, 41, 42, 50, 51, 60]),
        sampled=torch.tensor([0, 2, 3, 5]),
    )
    kept = step.copied().until({"a": 6, "b": 5})
    assert kept.requests == ["a", "a", "b", "b"]
    assert kept.positions.tolist() == [4, 5, 0, 1] and kept.tokens.tolist() == [40, 41, 50, 51]
    assert kept.rows["all"].tolist() == [[0.0, 1.0], [2.0, 3.0], [6.0, 7.0], [8.0, 9.0]]
    assert kept.sampled.tolist() == [0, 2] and kept.rows["head"].tolist() == [0.0, 2.0]
    assert step.until({}).requests == []
