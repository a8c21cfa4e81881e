"""`pilotage bench` on a tiny model: a real server, the real client, Hugging Face, and a step taken apart."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine


def test_bench_measures_both_and_says_where_the_time_goes() -> None:
    command = [sys.executable, "-m", "pilotage", "bench", "tiny:gemma3", "--repeats", "2", "--json"]
    command += ["--loads", "decode-x1,mixed", "--peer-python", sys.executable, "--peer-env", "VLLM_PLUGINS=pilotage"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)

    # Our own environment stands in for the peer: its vLLM runs on our platform as well.
    assert set(result["arms"]) == {"pilotage", "hf", "vllm"}
    for arm in result["arms"].values():
        for load in ("decode-x1", "mixed"):
            # A 99th percentile takes a hundred gaps between tokens.
            assert set(arm[load]) - {"itl_p99_ms"} == {"ttft_ms", "itl_ms", "decode_tok_s", "output_tok_s"}
            assert all(len(values) == 2 and min(values) > 0 for values in arm[load].values())
        assert arm["memory"]["peak_rss_mib"][0] > 100
    assert {row["against"] for row in result["ratios"]} == {"hf", "vllm"}
    for row in result["ratios"]:
        assert row["low"] <= row["ratio"] <= row["high"] and row["n"] in (1, 2)

    parts = {row["part"]: row for row in result["where_time_goes"] if row["load"] == "decode-x1"}
    assert {"attention", "head", "MLP", "sampling", "KV cache writes", "scheduler and engine loop"} <= set(parts)
    assert sum(row["share"] or 0 for row in parts.values()) == pytest.approx(1)
    assert any("vllm bench serve" in line and "--ignore-eos" in line for line in result["commands"])
    assert result["versions"]["vllm"] and result["machine"]["cores"] >= 1
