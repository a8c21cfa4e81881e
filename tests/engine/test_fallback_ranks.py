"""The fallback over two ranks: vLLM's transformers backend on our pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pilotage.core.errors import PilotageError
from pilotage.serving import launch
from pilotage.serving.fallback import table, tiny
from pilotage.serving.greedy import greedy

pytestmark = [pytest.mark.engine, pytest.mark.distributed]

# Windows and parallel blocks; projections in one matrix; layers without rotary embedding; biases and layer norms.
SHARDED = {
    "Cohere2ForCausalLM": "cohere2",
    "Phi3ForCausalLM": "phi3",
    "SmolLM3ForCausalLM": "smollm3",
    "Starcoder2ForCausalLM": "starcoder2",
}
LIMITS: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 32}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SHARDED)
def test_tokens_equal_hugging_faces(architecture: str, tmp_path: Path) -> None:
    path = tiny.checkpoint(architecture, SHARDED[architecture], tmp_path)
    words = json.loads((path / "config.json").read_text())["vocab_size"]
    expected, prompts = table.oracle(path, words), table.prompts(words)
    with launch.engine(path, dtype="float32", tensor_parallel_size=2, **LIMITS) as llm:
        for _ in range(2):  # cold, then with prefix hits
            said = greedy(llm, prompts, new_tokens=table.NEW_TOKENS, ignore_eos=True)
            assert [list(one.tokens) for one in said] == expected
        receipts = llm.collective_rpc("receipt")
    assert [receipt["fallback"]["dtype"] for receipt in receipts] == ["float32", "float32"]


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    path = tiny.checkpoint("OlmoeForCausalLM", "olmoe", tmp_path)
    with (
        pytest.raises(PilotageError, match="tensor_parallel_size=2 for a mixture of experts"),
        launch.engine(path, dtype="float32", tensor_parallel_size=2, **LIMITS),
    ):
        raise AssertionError("the engine started")


@pytest.mark.slow
def test_what_the_backend_computes_otherwise_is_refused(tmp_path: Path) -> None:
    """Granite divides its logits by a number of its own, which the backend leaves out: the proof shows it."""
    path = tiny.checkpoint("GraniteForCausalLM", "granite", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "logits_scaling": 3.0}))
    with (
        pytest.raises(PilotageError, match=r"logits alone are .* from its own forward's"),
        launch.engine(path, dtype="float32", tensor_parallel_size=2, **LIMITS),
    ):
        raise AssertionError("the engine started")
