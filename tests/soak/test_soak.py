"""The soak: a short one always, the full one of 2,000 requests among the slow tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import soak

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("requests", [60, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_nothing_is_lost_wrong_stuck_or_leaked(tiny: Callable[..., Path], requests: int) -> None:
    result = soak.run(tiny("gemma3"), requests, seed=requests, checked=min(requests, 200))
    assert result["wrong"] == []
    assert len(result["requests"]) == 6, "every kind of request was sent"
    assert result["checked_against_hf"] > requests // 12


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("options", [{"compiled": True}, {"ranks": 2}, {"ngram": 3}], ids=str)
def test_the_other_ways_to_serve(tiny: Callable[..., Path], options: dict[str, Any]) -> None:
    result = soak.run(tiny("gemma3"), 150, seed=5, checked=100, **options)
    assert result["wrong"] == []


def test_a_metric_is_summed_over_its_labels() -> None:
    text = '# HELP a b\nvllm:a{x="1"} 2.0\nvllm:a{x="2"} 3.5\nvllm:ab 7.0\n'
    assert soak.metric(text, "vllm:a") == 5.5
    with pytest.raises(ValueError, match="no vllm:c"):
        soak.metric(text, "vllm:c")


def test_growth_is_seen_past_the_start() -> None:
    assert soak.growth([100, 500, 500, 500, 500, 500, 500, 500]) == 0
    assert soak.growth([1, 1, 10, 10, 20, 20, 40, 40]) == 30
