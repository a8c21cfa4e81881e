"""Compiled graphs: the same tokens, no compiling after the start, and a cache on disk that is checked before use."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_tokens, generate, prompts_of

from pilotage.core.errors import Unavailable
from pilotage.serving import compile_cache, launch
from pilotage.serving.graphs import Graphs

pytestmark = pytest.mark.engine

CONFIG = {"num_batched_tokens_buckets": [48], "num_seqs_buckets": [4]}


def start(path: Path) -> AbstractContextManager[Any]:
    return launch.engine(path, dtype="float32", max_model_len=128, max_num_seqs=4, additional_config=CONFIG)


def buckets(llm: Any) -> list[dict[str, Any]]:
    (receipt,) = llm.collective_rpc("receipt")
    return list(receipt["buckets"])


def flip(file: Path) -> None:
    """Damage a file in its middle; under a new inode, because this process may have the old one mapped as code."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    damaged = file.with_suffix(".damaged")
    damaged.write_bytes(data)
    damaged.replace(file)


def test_cold_warm_and_damaged(
    tiny: Callable[..., Path], oracle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setenv("PILOTAGE_COMPILE_CACHE", str(tmp_path))
    path = tiny("gemma3", num_hidden_layers=1, layer_types=["sliding_attention"])
    prompts = prompts_of((3, 20, 70, 49, 90), seed=1)
    references = [oracle(path).greedy(prompt, 12) for prompt in prompts]

    with start(path) as llm:
        cold = buckets(llm)
        assert [(row["kind"], row["size"], row["cached"]) for row in cold] == [
            ("decode", 4, False),
            ("prefill", 48, False),
        ]
        traced = dict(counters["stats"])
        check_tokens(generate(llm, prompts, 12), references)
        assert dict(counters["stats"]) == traced, "something was traced while serving"
        (receipt,) = llm.collective_rpc("receipt")
    with start(path) as llm:
        warm = buckets(llm)
        assert all(row["cached"] for row in warm)
        assert sum(row["seconds"] for row in warm) * 5 < sum(row["seconds"] for row in cold)
        check_tokens(generate(llm, prompts, 12), references)
        # What is in a graph is known although it was not traced here.
        (again,) = llm.collective_rpc("receipt")
        assert again["operators"].keys() == receipt["operators"].keys()

    # What was built elsewhere serves where nothing may be compiled.
    elsewhere = tmp_path.with_name("elsewhere")
    shutil.copytree(tmp_path, elsewhere)
    with monkeypatch.context() as patch:
        patch.setenv("PILOTAGE_COMPILE_CACHE", str(elsewhere))
        patch.setenv("PILOTAGE_DISABLE_WARMUP_COMPILE", "1")
        with hidden(tmp_path), start(path) as llm:
            assert all(row["cached"] for row in buckets(llm))
            check_tokens(generate(llm, prompts, 12), references)
        (graph,) = elsewhere.rglob("decode-4.graph")
        graph.unlink()
        with pytest.raises(Unavailable, match=r"forbids compiling: decode-4; run `pilotage compile`"), start(path):
            pass

    # A damaged graph is compiled again, a damaged library built again from its graph.
    (directory,) = tmp_path.iterdir()
    library = sorted(directory.rglob("*.so"))[0]
    for file, cached in ((directory / "decode-4.graph", [False, True]), (library, [True, True])):
        flip(file)
        damaged = file.read_bytes()
        with start(path) as llm:
            assert [row["cached"] for row in buckets(llm)] == cached
            check_tokens(generate(llm, prompts, 12), references)
        assert not file.exists() or file.read_bytes() != damaged


@contextlib.contextmanager
def hidden(directory: Path) -> Iterator[None]:
    away = directory.with_name("away")
    directory.rename(away)
    try:
        yield
    finally:
        away.rename(directory)


def test_graphs_that_look_back_a_part_of_the_way(
    tiny: Callable[..., Path], oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The definitions read every page of a graph's block table, so one that is too short gives wrong tokens."""
    monkeypatch.setenv("PILOTAGE_DISABLE_KERNELS", "1")
    ran: list[str] = []
    real = Graphs.run
    monkeypatch.setattr(Graphs, "run", lambda self, inputs: (ran.append(inputs.key.name), real(self, inputs))[1])
    path = tiny("gemma3", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    config = {
        "num_batched_tokens_buckets": [256],
        "num_seqs_buckets": [4],
        "decode_context_length_buckets": [128, 512],
        "kv_segment_size_buckets": [512],
    }
    prompts = prompts_of((5, 120, 300, 509, 620), seed=1)
    with launch.engine(
        path, dtype="float32", max_model_len=1024, max_num_seqs=4, enforce_eager=True, additional_config=config
    ) as llm:
        for prompt in prompts:
            check_tokens(generate(llm, [prompt], 12), [oracle(path).greedy(prompt, 12)])
        check_tokens(generate(llm, prompts, 6), [oracle(path).greedy(prompt, 6) for prompt in prompts])
    assert set(ran) == {
        "prefill-256-fresh",
        "prefill-256-segment512",
        "decode-4-context128",
        "decode-4-context512",
        "decode-4",
    }


def test_other_code_is_another_fingerprint(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real = compile_cache.fingerprint

    def spy(*arguments: Any) -> str:
        model = arguments[1]
        seen.append(real(*arguments))
        with monkeypatch.context() as patch:
            patch.setattr(compile_cache, "_code", lambda: "other code")
            seen.append(real(*arguments))
        with torch.no_grad():
            next(model.parameters()).mul_(2)
        assert real(*arguments) == seen[-2], "the values of the weights do not matter"
        return seen[-2]

    monkeypatch.setattr("pilotage.serving.graphs.fingerprint", spy)
    # Compiling is not the point here: only the fingerprints are.
    monkeypatch.setattr("pilotage.serving.graphs.Graphs._compile_at_once", lambda *_: {})
    monkeypatch.setattr("pilotage.serving.graphs.Graphs._prepare", lambda *_, **__: None)
    with start(tiny("gemma3")):
        pass
    with start(tiny("gemma3", rms_norm_eps=1e-5)):
        pass
    assert len(seen) == len(set(seen)) == 4
