"""`pilotage bench` on a tiny model: a real server, the real client, Hugging Face, and a step taken apart."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.engine


def bench(*options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "pilotage", "bench", "tiny:gemma3", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def check_arms(result: dict[str, Any], loads: tuple[str, ...], repeats: int) -> None:
    for arm in result["arms"].values():
        for load in loads:
            # A 99th percentile takes a hundred gaps between tokens.
            assert set(arm[load]) - {"itl_p99_ms", "steady_tok_s"} == {
                "ttft_ms",
                "itl_ms",
                "decode_tok_s",
                "output_tok_s",
            }
            assert all(len(values) == repeats and min(values) > 0 for values in arm[load].values())
        assert arm["memory"]["peak_rss_mib"][0] > 100
    for row in result["ratios"]:
        assert row["low"] <= row["ratio"] <= row["high"] and row["n"] in (1, repeats)


def test_bench_measures_both_and_says_where_the_time_goes() -> None:
    result = bench("--repeats", "1", "--loads", "decode-x1")
    assert set(result["arms"]) == {"pilotage", "hf"}
    check_arms(result, ("decode-x1",), 1)
    assert {row["against"] for row in result["ratios"]} == {"hf"}

    parts = {row["part"]: row for row in result["where_time_goes"] if row["load"] == "decode-x1"}
    assert {"attention", "head", "MLP", "sampling", "KV cache writes", "scheduler and engine loop"} <= set(parts)
    assert sum(row["share"] or 0 for row in parts.values()) == pytest.approx(1)
    assert any("vllm bench serve" in line and "--ignore-eos" in line for line in result["commands"])
    assert result["versions"]["vllm"] and result["machine"]["cores"] >= 1


@pytest.mark.slow
def test_another_environment_is_measured_beside_it() -> None:
    """Our own environment stands in for the peer: its vLLM runs on our platform as well."""
    peer = ("--peer-python", sys.executable, "--peer-env", "VLLM_PLUGINS=pilotage", "--no-profile")
    result = bench("--repeats", "2", "--loads", "decode-x1,mixed", *peer)
    assert set(result["arms"]) == {"pilotage", "hf", "vllm"}
    check_arms(result, ("decode-x1", "mixed"), 2)
    assert {row["against"] for row in result["ratios"]} == {"hf", "vllm"}
