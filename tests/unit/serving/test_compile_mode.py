from __future__ import annotations

from pathlib import Path

import pytest

from pilotage.core.errors import ConfigError
from pilotage.serving import compile_mode


def test_compiling_only_needs_a_target() -> None:
    compile_mode.require({})
    compile_mode.require({"PILOTAGE_CPU_COMPILE": "1", "PILOTAGE_TARGET": "cpu"})
    compile_mode.require({"VLLM_NEURON_CPU_COMPILE": "1", "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"})
    with pytest.raises(ConfigError, match="no target is named"):
        compile_mode.require({"PILOTAGE_CPU_COMPILE": "1"})
    with pytest.raises(ConfigError, match="exclude each other"):
        compile_mode.require(
            {"PILOTAGE_CPU_COMPILE": "1", "PILOTAGE_TARGET": "cpu", "VLLM_NEURON_DISABLE_WARMUP_COMPILE": "1"}
        )


def test_a_missing_graph_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compile_mode.compiles()
    monkeypatch.setenv("VLLM_NEURON_DISABLE_WARMUP_COMPILE", "1")
    assert not compile_mode.compiles()
    text = str(compile_mode.not_compiled([f"prefill-{n}" for n in range(6)], Path("/cache/abc")))
    assert text.startswith("/cache/abc: ")
    assert "VLLM_NEURON_DISABLE_WARMUP_COMPILE=1 forbids compiling" in text
    assert "prefill-3 and 2 more" in text
