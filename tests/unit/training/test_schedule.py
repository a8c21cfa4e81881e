"""The learning rate rises, falls, and ends where it was told to."""

from __future__ import annotations

import pytest

from pilotage.training.schedule import factor


def curve(kind: str, **how: float) -> list[float]:
    options = {"steps": 11, "warmup_steps": 4, "final": 0.2, **how}
    return [factor(step, kind=kind, **options) for step in range(options["steps"])]


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    assert curve("cosine")[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_it_falls_from_the_peak_to_the_end(kind: str) -> None:
    found = curve(kind)[4:]
    assert found[0] == pytest.approx(1.0) and found[-1] == pytest.approx(0.2)
    assert found == sorted(found, reverse=True)
    assert found[3] == pytest.approx(0.6)  # half way


def test_constant_stays_and_one_step_runs_end_where_they_should() -> None:
    assert set(curve("constant")[4:]) == {1.0}
    assert curve("cosine", steps=1, warmup_steps=0) == [0.2]
