"""Capture under the real engine: every row at its address, whatever the scheduler does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import generate, prompts_of, tokens_of

from pilotage.core.errors import ConfigError
from pilotage.models.common.paging import PagedSession
from pilotage.probe import Captures
from pilotage.serving import launch

pytestmark = pytest.mark.engine

CONFIG = {"num_batched_tokens_buckets": [16, 64], "num_seqs_buckets": [1, 4]}
SITES = ["model.layers.*", "model.layers.[0-1].self_attn.q_rope", "**.mlp.input", "model.norm", "lm_head"]
LENGTHS = (3, 20, 33, 70, 100)
NAMES = ["llama3", "gemma3"]


def expected(path: Path, streams: list[list[int]], sites: list[str]) -> list[dict[str, torch.Tensor]]:
    """What our own model has at the sites when a stream is computed at once, without an engine."""
    from pilotage.accuracy.arms.module import OurModules
    from pilotage.probe import Taps

    longest = max(len(stream) for stream in streams)
    ours = OurModules(path, torch.float32, longest)
    taps = Taps(ours.model, capture=sites, num_tokens=longest, num_sampled=longest)
    found = []
    for stream in streams:
        session = PagedSession(model=ours.model, num_requests=1, max_tokens=longest, block_size=16)
        with taps.active(len(stream), len(stream)):
            session.step({0: stream})
        found.append({name: taps.rows(name, len(stream), len(stream)).clone() for name in taps.capture})
    return found


def check(
    captures: Captures, path: Path, prompts: list[list[int]], outputs: list[list[int]], cached: list[int]
) -> None:
    """Hold every row that was captured against the model without an engine."""
    streams = [[*prompt, *output[:-1]] for prompt, output in zip(prompts, outputs, strict=True)]
    truth = expected(path, streams, list(captures.sites))
    seen: set[str] = set()
    for stream, prompt, want, hit in zip(streams, prompts, truth, cached, strict=True):
        request = next(name for name in captures.find(prompt) if name not in seen)
        seen.add(request)
        positions, tokens = captures.tokens(request)
        assert positions.tolist() == list(range(hit, len(stream))), "computed positions, and no others"
        assert tokens.tolist() == stream[hit:]
        for site in captures.sites:
            positions, rows = captures.get(request, site)
            assert rows.dtype == torch.float32
            if site == "lm_head":
                assert set(range(len(prompt) - 1, len(stream))) <= set(positions.tolist())
            else:
                assert positions.tolist() == list(range(hit, len(stream)))
            difference = (rows - want[site][positions]).abs().max()
            assert difference < 2e-4, (site, float(difference))


@pytest.fixture(scope="module", params=NAMES)
def served(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> Iterator[tuple[Path, Any]]:
    path = tiny(request.param)
    with launch.engine(
        path, dtype="float32", enforce_eager=True, max_model_len=192, max_num_seqs=4, additional_config=CONFIG
    ) as llm:
        yield path, llm


def test_mixed_chunked_batches_and_prefix_hits(served: tuple[Path, Any], tmp_path: Path) -> None:
    path, llm = served
    prompts = prompts_of(LENGTHS, seed=1)
    (names,) = llm.collective_rpc("capture_start", args=(str(tmp_path / "cold"), SITES))
    assert "model.layers.1.self_attn.q_rope" in names and "model.layers.2.self_attn.q_rope" not in names
    cold = generate(llm, prompts, 6)
    (summary,) = llm.collective_rpc("capture_stop")
    assert summary["observer"]["prefill"]["bitwise"] and summary["observer"]["decode"]["bitwise"]
    captures = Captures.open(tmp_path / "cold")
    assert captures.complete and list(captures.sites) == names and captures.notes["observer"] == summary["observer"]
    assert len(captures) == summary["steps"]
    check(captures, path, prompts, tokens_of(cold), [0] * len(prompts))
    # Again: what is found in the prefix cache is not computed, and has no row.
    llm.collective_rpc("capture_start", args=(str(tmp_path / "warm"), SITES))
    warm = generate(llm, prompts, 6)
    llm.collective_rpc("capture_stop")
    cached = [output.num_cached_tokens for output in warm]
    assert sum(cached) >= 32 * 3
    check(Captures.open(tmp_path / "warm"), path, prompts, tokens_of(warm), cached)
    assert tokens_of(generate(llm, prompts, 6)) == tokens_of(cold), "nothing is tapped any more"
    assert len(Captures.open(tmp_path / "warm")) == len(list((tmp_path / "warm").glob("*.safetensors")))


def test_a_site_that_does_not_exist_is_named(served: tuple[Path, Any], tmp_path: Path) -> None:
    _, llm = served
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mpl.*nearest is 'model\.layers\.0\.mlp'"):
        llm.collective_rpc("capture_start", args=(str(tmp_path), ["model.layers.0.mpl"]))


def test_preempted_requests_have_the_row_computed_last(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny("llama3")
    prompts = prompts_of((60, 50, 40, 30, 64, 20), seed=4)
    with launch.engine(
        path,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        additional_config=CONFIG,
        block_size=16,
        num_gpu_blocks_override=13,
        enable_prefix_caching=False,
        disable_log_stats=False,
    ) as llm:
        llm.collective_rpc("capture_start", args=(str(tmp_path), ["model.layers.*", "**.heads"]))
        outputs = generate(llm, prompts, 40)
        llm.collective_rpc("capture_stop")
        counted = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    assert counted["vllm:num_preemptions"] > 0
    captures = Captures.open(tmp_path)
    computed = sum(len(step.request) for step in captures._steps)
    assert computed > sum(len(prompt) + 39 for prompt in prompts), "some rows were computed twice"
    check(captures, path, prompts, tokens_of(outputs), [0] * len(prompts))


@pytest.mark.slow
def test_a_server_started_with_captures_and_a_reference_on_disk(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """The document's online form; the server is ended in the middle, and what it recorded is whole all the same."""
    import json
    import urllib.request

    path = tiny("gemma3")
    prompt = prompts_of([30], seed=3)[0]
    stream = [*prompt, 7, 8, 9]
    rows = expected(tiny("gemma3", seed=3), [stream], ["model.norm"])[0]["model.norm"]
    steps = [rows[None, :30], *(rows[None, : end + 1] for end in range(30, 33))]
    torch.save([{"model.norm": steps}], tmp_path / "tensors.pt")
    torch.save([prompt], tmp_path / "prompt_token_ids.pt")
    config = {
        **CONFIG,
        "tensor_capture": {"sites": ["model.norm", "model.layers.0"], "path": str(tmp_path / "captures")},
        "tensor_replacement": {
            "reference_captures_path": str(tmp_path / "tensors.pt"),
            "prompt_token_ids_path": str(tmp_path / "prompt_token_ids.pt"),
        },
    }
    with launch.server(
        path, dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=4, additional_config=config
    ) as served:
        body = {"model": served.model, "prompt": prompt, "max_tokens": 2, "temperature": 0.0, "return_token_ids": True}
        request = urllib.request.Request(
            f"{served.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as answer:
            said = json.loads(answer.read())["choices"][0]["token_ids"]
    from pilotage.accuracy.arms.module import OurModules

    head = OurModules(path, torch.float32, 64).model.compute_logits
    assert said == [int(head(rows[position : position + 1]).argmax()) for position in (29, 30)]
    captures = Captures.open(tmp_path / "captures")
    assert not captures.complete
    (name,) = captures.find(prompt)
    assert captures.get(name, "model.norm")[0].tolist() == list(range(31))
    own = expected(path, [[*prompt, said[0]]], ["model.norm", "model.layers.0"])[0]
    for site, value in own.items():
        assert (captures.get(name, site)[1] - value).abs().max() < 2e-4, "the live value is what is recorded"


@pytest.mark.slow
def test_exact_taps_change_nothing_in_bf16(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """The taps that a compiler would otherwise fuse around."""
    config = {
        "num_batched_tokens_buckets": [48],
        "num_seqs_buckets": [4],
        "exact_taps": True,
        "tensor_capture": {"sites": ["**.self_attn", "**.mlp"]},
    }
    path = tiny("llama3", num_hidden_layers=2)
    with launch.engine(path, dtype="bfloat16", max_model_len=128, max_num_seqs=4, additional_config=config) as llm:
        (receipt,) = llm.collective_rpc("receipt")
    assert receipt["observer"]["prefill"]["bitwise"] and receipt["observer"]["decode"]["bitwise"]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_compiled(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny("gemma3", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    prompts = prompts_of(LENGTHS, seed=5)
    config = {
        "num_batched_tokens_buckets": [48],
        "num_seqs_buckets": [4],
        "tensor_capture": {"sites": [*SITES, "**.heads", "**.k_rope"], "path": str(tmp_path)},
    }
    with launch.engine(
        path,
        dtype="float32",
        max_model_len=192,
        max_num_seqs=4,
        tensor_parallel_size=2,
        enable_prefix_caching=False,
        additional_config=config,
    ) as llm:
        outputs = generate(llm, prompts, 6)
        summary = llm.collective_rpc("capture_stop")[0]
    print(summary["observer"])
    check(Captures.open(tmp_path), path, prompts, tokens_of(outputs), [0] * len(prompts))


@pytest.mark.slow  # test_replacement.py compiles with both
def test_compiled_with_the_sites_in_the_configuration(tiny: Callable[..., Path], tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    path = tiny("gemma3", num_hidden_layers=3, layer_types=["sliding_attention"] * 2 + ["full_attention"])
    prompts = prompts_of(LENGTHS, seed=2)
    config = {
        "num_batched_tokens_buckets": [48],
        "num_seqs_buckets": [4],
        "tensor_capture": {"sites": SITES, "path": str(tmp_path)},
    }
    with launch.engine(path, dtype="float32", max_model_len=192, max_num_seqs=4, additional_config=config) as llm:
        traced = dict(counters["stats"])
        outputs = generate(llm, prompts, 6)
        assert dict(counters["stats"]) == traced, "something was traced while serving"
        (summary,) = llm.collective_rpc("capture_stop")
        (receipt,) = llm.collective_rpc("receipt")
    assert {row.get("tapped", False) for row in receipt["buckets"]} == {True, False}
    print(summary["observer"])
    assert summary["observer"]["prefill"]["relative_rms"] < 1e-5
    check(Captures.open(tmp_path), path, prompts, tokens_of(outputs), [0] * len(prompts))
