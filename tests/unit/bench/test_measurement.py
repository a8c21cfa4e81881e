"""Loads, metrics and ratios."""

from __future__ import annotations

from typing import Any

import pytest

from pilotage.bench.arms import ServerArm, client_arguments, find_peer
from pilotage.bench.loads import LOADS, Load, choose
from pilotage.bench.measurement import InOnePiece, metrics, ratios, steady
from pilotage.bench.run import room_for
from pilotage.core.errors import BadInput, Unavailable


def test_all_loads_that_fit_are_the_default() -> None:
    default = [load.name for load in choose(None, max_model_len=2048)]
    assert default == ["decode-x1", "decode-x8", "prefill-1024", "mixed"]
    assert [load.name for load in choose("serve-64,decode-x32", max_model_len=2048)] == ["serve-64", "decode-x32"]
    assert "prefill-1024" not in [load.name for load in choose(None, max_model_len=1024)]


def test_a_load_can_be_named_once() -> None:
    assert [load.name for load in choose("mixed, decode-x1,mixed", max_model_len=2048)] == ["mixed", "decode-x1"]


def test_unknown_and_too_long_loads_are_refused_by_name() -> None:
    with pytest.raises(BadInput, match=r"no load 'decode-x2'.*decode-x1"):
        choose("decode-x2", max_model_len=2048)
    with pytest.raises(BadInput, match="prefill-1024 needs 1026 tokens, the model serves 1024"):
        choose("prefill-1024", max_model_len=1024)
    with pytest.raises(BadInput, match="longer than the model's 16 tokens"):
        choose(None, max_model_len=16)


def test_metrics_of_a_batch() -> None:
    found = metrics(
        LOADS["decode-x8"],
        ttfts_s=[0.1] * 8,
        decode_s=[6.3] * 8,  # 63 steps of 0.1 s
        output_lens=[64] * 8,
        duration_s=6.4,
    )
    assert found == pytest.approx({"ttft_ms": 100, "itl_ms": 100, "decode_tok_s": 80, "output_tok_s": 80})


def test_a_prefill_has_no_decode_metrics() -> None:
    found = metrics(LOADS["prefill-1024"], ttfts_s=[0.5], decode_s=[0.0], output_lens=[1], duration_s=0.5)
    assert found == pytest.approx({"ttft_ms": 500, "output_tok_s": 2})


@pytest.mark.parametrize("lengths", [[], [63]])
def test_short_answers_are_not_measured(lengths: list[int]) -> None:
    with pytest.raises(Unavailable, match="64 were asked for"):
        metrics(LOADS["decode-x1"], ttfts_s=[0.1], decode_s=[1.0], output_lens=lengths, duration_s=1.0)


def test_ratios_pair_the_repeats_and_above_one_is_better() -> None:
    arms = {
        "pilotage": {
            "a": {"decode_tok_s": [10.0, 40.0, 30.0], "ttft_ms": [50.0]},
            "memory": {"peak_rss_mib": [500.0]},
            "start": {"seconds": [3.0]},
        },
        "hf": {"a": {"decode_tok_s": [20.0, 20.0, 20.0], "ttft_ms": [100.0]}, "memory": {"peak_rss_mib": [1000.0]}},
    }
    rows = {(row["load"], row["metric"]): row for row in ratios(arms, "pilotage")}
    decode = rows["a", "decode_tok_s"]
    assert (decode["ratio"], decode["low"], decode["high"], decode["n"]) == (1.5, 0.5, 2.0, 3)
    assert rows["a", "ttft_ms"]["ratio"] == 2.0
    assert rows["memory", "peak_rss_mib"]["ratio"] == 2.0
    assert ("start", "seconds") not in rows  # Hugging Face starts no server
    assert {row["against"] for row in rows.values()} == {"hf"}


def test_the_slowest_gaps_are_told() -> None:
    """A stall that the mean hides."""
    load = LOADS["serve-64"]
    gaps = [0.01] * 195 + [1.0] * 5
    how: dict[str, Any] = {"ttfts_s": [0.1], "decode_s": [sum(gaps)], "output_lens": [201], "duration_s": 8.0}
    found = metrics(load, **how, gaps_s=[gaps])
    assert found["itl_ms"] < 36 and found["itl_p99_ms"] == pytest.approx(1000)
    assert metrics(load, **how, gaps_s=[[0.01] * 200])["itl_p99_ms"] == pytest.approx(10)
    assert "itl_p99_ms" not in metrics(load, **how, gaps_s=[gaps[:50], gaps[:50]])  # too few to tell
    rows = ratios(
        {name: {"a": {"itl_p99_ms": [value]}} for name, value in (("pilotage", 10.0), ("x", 15.0))}, "pilotage"
    )
    assert rows[0]["ratio"] == 1.5


def test_prompts_of_others_are_no_part_of_the_steady_phase() -> None:
    """Four requests whose prompts take a second each, one after another; then steps of 0.1 s of all four."""
    load = Load(name="x", input_len=9, output_len=40, concurrency=4, num_prompts=4, about="")
    gaps = [[1.0] * (3 - n) + [0.1] * (36 + n) for n in range(4)]
    how: dict[str, Any] = {"ttfts_s": [1.0, 2.0, 3.0, 4.0], "output_lens": [40] * 4, "duration_s": 8.0}
    found = metrics(load, **how, decode_s=[sum(g) for g in gaps], gaps_s=gaps, starts_s=[5.0] * 4)
    assert found["steady_tok_s"] == pytest.approx(40)
    assert found["decode_tok_s"] < 30
    # Tokens that come in pairs are as many tokens.
    pairs = [[1.0] * (3 - n) + [0.2] * ((36 + n) // 2) for n in range(4)]
    lengths = [1 + 3 - n + 2 * ((36 + n) // 2) for n in range(4)]
    assert steady([6.0, 7.0, 8.0, 9.0], pairs, lengths) == pytest.approx(40, rel=0.1)
    # No time at which all decode, or one request, or an arm that does not tell: nothing.
    assert steady([1.0, 2.0, 3.0, 99.0], gaps, [40] * 4) is None
    assert "steady_tok_s" not in metrics(load, **how, decode_s=[sum(g) for g in gaps], gaps_s=gaps)
    one = {"ttfts_s": [1.0], "output_lens": [40], "duration_s": 8.0, "decode_s": [3.9]}
    assert "steady_tok_s" not in metrics(load, **one, gaps_s=[[0.1] * 39], starts_s=[0.0])


def test_the_server_gets_room_for_what_runs_at_once() -> None:
    shared = {"max_num_seqs": 8, "max_model_len": 2048, "additional_config": {"num_seqs_buckets": [1, 8], "x": 1}}
    assert room_for([LOADS["decode-x8"], LOADS["prefill-1024"]], shared) is shared
    larger = room_for([LOADS["decode-x32"], LOADS["decode-x1"]], shared)
    assert larger["max_num_seqs"] == 32 and larger["max_model_len"] == 2048
    assert larger["additional_config"] == {"num_seqs_buckets": [1, 8, 32], "x": 1}
    assert room_for([LOADS["serve-64"]], shared)["additional_config"]["num_seqs_buckets"] == [1, 8, 32, 64]
    assert shared["additional_config"]["num_seqs_buckets"] == [1, 8]


def test_the_client_sends_greedy_requests_of_the_load() -> None:
    arguments = client_arguments(LOADS["mixed"], url="http://127.0.0.1:1", model="m", seed=7)
    said = dict(zip(arguments[:-2:2], arguments[1:-2:2], strict=True))
    assert said["--random-range-ratio"] == "0.5" and said["--max-concurrency"] == "4" and said["--seed"] == "7"
    assert said["--temperature"] == "0" and arguments[-2:] == ["--ignore-eos", "--disable-tqdm"]


def test_a_peer_that_is_none(tmp_path: object) -> None:
    with pytest.raises(Unavailable, match="no such interpreter"):
        find_peer(f"{tmp_path}/python")
    with pytest.raises(Unavailable, match="does not run"):
        find_peer("/bin/false")


def test_a_peer_without_vllm(tmp_path: object) -> None:
    import subprocess
    import sys

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", f"{tmp_path}/venv"], check=True)
    with pytest.raises(Unavailable, match="no vllm in that environment"):
        find_peer(f"{tmp_path}/venv/bin/python")


def test_an_answer_in_one_piece_has_no_time_between_tokens() -> None:
    with pytest.raises(InOnePiece, match="no time between tokens"):
        metrics(LOADS["decode-x1"], ttfts_s=[0.1], decode_s=[0.0], output_lens=[64], duration_s=0.1)


def test_a_repeat_in_one_piece_is_tried_again() -> None:
    class Client:
        def __init__(self) -> None:
            self.decode_s: list[list[float]] = [[], [0.01] * 63]

        def ask(self, question: object) -> dict[str, object]:
            return {
                "failed": 0,
                "completed": 1,
                "errors": [""],
                "ttfts": [0.1],
                "itls": [self.decode_s.pop(0)],
                "start_times": [0.0],
                "output_lens": [64],
                "duration": 0.73,
                "prompts": ["text"],
            }

    client = Client()
    found, asked = ServerArm(client, url="http://127.0.0.1:1", model="m").measure(LOADS["decode-x1"], 0)  # type: ignore[arg-type]
    assert found["itl_ms"] == pytest.approx(10) and asked.prompts == ["text"]

    client.decode_s = [[]] * ServerArm.ATTEMPTS
    with pytest.raises(InOnePiece):
        ServerArm(client, url="http://127.0.0.1:1", model="m").measure(LOADS["decode-x1"], 0)  # type: ignore[arg-type]
    assert not client.decode_s
