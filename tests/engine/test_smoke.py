"""`pilotage smoke` on a real engine, right and wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pilotage.cli import main
from pilotage.core.nouns import Status
from pilotage.serving import settings
from pilotage.voyage.smoke import smoke

pytestmark = pytest.mark.engine


@pytest.fixture
def two_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small prefill graph next to the one for decoding: what is tested here does not depend on their sizes."""
    monkeypatch.setattr(settings, "COMPARING_TOKEN_BUCKETS", (256,))


def test_a_right_model_passes_with_texts_buckets_and_a_receipt(tiny: Callable[..., Path], two_graphs: None) -> None:
    found = smoke(str(tiny("gemma3")), dtype="float32")
    assert found.status is Status.PASS, [verdict.to_json() for verdict in found.verdicts]
    assert [(bucket["kind"], bucket["size"]) for bucket in found.buckets] == [("decode", 8), ("prefill", 256)]
    result = json.loads(json.dumps(found.to_json()))
    assert len(result["prompts"]) == 4 and result["prompts"][-1]["past_window"] is True
    assert result["prompts"][-1]["prompt_tokens"] > 3 * 16
    assert all(prompt["agrees_with_hf"] in (True, "tie") for prompt in result["prompts"])
    assert all(prompt["token_ids"] for prompt in result["prompts"])
    assert {"qkv_proj", "attention_decode", "lm_head"} <= set(result["receipt"]["operators"])
    assert len(result["verdicts"]) == 5


def test_wrong_first_tokens_fail(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine serves another RoPE base than Hugging Face computes with."""
    from pilotage.voyage import smoke as module

    right, wrong = tiny("qwen3"), tiny("qwen3", rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    shared = settings.shared
    monkeypatch.setattr(settings, "shared", lambda *given: {**shared(*given), "enforce_eager": True})
    compare = module._compare
    monkeypatch.setattr(module, "_compare", lambda path, dtype, pairs: compare(right, dtype, pairs))
    found = smoke(str(wrong), dtype="float32")
    assert found.status is Status.FAIL
    failed = [verdict for verdict in found.verdicts if verdict.status is Status.FAIL]
    assert [verdict.metric for verdict in failed] == ["tokens that differ by more than a tie"]
    assert failed[0].evidence["differing"]


def test_a_checkpoint_that_lacks_a_tensor_is_named(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source, broken = tiny("llama3"), tmp_path / "broken"
    broken.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.is_file():
            (broken / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(sys, "argv", ["pilotage", "smoke", str(broken), "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capfd.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert "model.layers.2.mlp.up_proj.weight" in said.err and "Traceback" not in said.err


def test_an_unknown_dtype_is_refused() -> None:
    command = [sys.executable, "-m", "pilotage", "smoke", "tiny:llama3", "--dtype", "float8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "'float8' is no serving dtype" in done.stderr
