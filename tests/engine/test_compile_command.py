"""`pilotage compile` fills the cache that serving reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from pilotage.core.errors import BadInput
from pilotage.serving.precompile import precompile


@pytest.mark.slow
def test_the_second_time_everything_is_there(tmp_path: Path) -> None:
    first = precompile("tiny:llama3", cache_dir=tmp_path)
    assert first.directory == str(tmp_path)
    assert {graph["kind"] for graph in first.graphs} == {"prefill", "decode"}
    assert not any(graph["cached"] for graph in first.graphs)
    second = precompile("tiny:llama3", cache_dir=tmp_path)
    assert all(graph["cached"] for graph in second.graphs)
    assert [graph["size"] for graph in second.graphs] == [graph["size"] for graph in first.graphs]


def test_a_switched_off_warm_up_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTAGE_DISABLE_WARMUP_COMPILE", "1")
    with pytest.raises(BadInput, match="unset it"):
        precompile("tiny:llama3")
