"""`pilotage compile` fills the cache that serving reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pilotage.core.errors import BadInput
from pilotage.serving import launch
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


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_that_only_compiles(
    ranks: int, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny("llama3")
    config = {"num_batched_tokens_buckets": [32], "num_seqs_buckets": [2], "decode_context_length_buckets": [128]}
    serve = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(path), "--dtype", "float32"]
    serve += ["--max-model-len", "256", "--max-num-seqs", "2", "--port", "0", "--tensor-parallel-size", str(ranks)]
    serve += ["--additional-config", json.dumps({"pilotage": config})]
    variables = {**os.environ, "PILOTAGE_COMPILE_CACHE": str(tmp_path), "PILOTAGE_CPU_COMPILE": "1"}

    refused = subprocess.run(serve, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert refused.returncode == 2
    assert "no target is named to compile for; set PILOTAGE_TARGET" in refused.stderr

    variables["PILOTAGE_TARGET"] = "cpu"
    ended = subprocess.run(serve, env=variables, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("3 graphs, 3 compiled now") == ranks
    # With them, a server that may not compile serves.
    monkeypatch.setenv("PILOTAGE_COMPILE_CACHE", str(tmp_path))
    monkeypatch.setenv("PILOTAGE_DISABLE_WARMUP_COMPILE", "1")
    with launch.engine(
        path,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=2,
        tensor_parallel_size=ranks,
        additional_config=config,
    ) as llm:
        receipt = llm.collective_rpc("receipt")[0]
    assert [row["name"] for row in receipt["buckets"]] == ["decode-2-context128", "decode-2", "prefill-32"]
    assert all(row["cached"] for row in receipt["buckets"])
