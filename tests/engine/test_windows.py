"""Layers with a window give their pages back while a request runs, and what is left of the cache holds more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import check_tokens, generate, prompts_of

from pilotage.core.errors import PilotageError
from pilotage.serving import launch

pytestmark = pytest.mark.engine

BLOCK, WINDOW, MAX_LEN, BATCHED = 16, 16, 512, 16
# Of one layer of tiny gemma3 in fp32: keys and values, 2 heads of 20 numbers, 16 tokens. Its 6 layers are 2 that see
# everything and 4 with a window, so vLLM makes three groups of 2, which share pages of 2 layers.
LAYER_PAGE = 2 * 2 * 20 * BLOCK * 4
FULL_PAGES = MAX_LEN // BLOCK
# What a windowed group may hold at once: the window and two batches in flight, and a page because neither starts one.
WINDOW_PAGES = -(-(WINDOW - 1 + 2 * BATCHED) // BLOCK) + 1
PAGES = FULL_PAGES + 2 * WINDOW_PAGES + 1


def engine(path: Path, **settings: Any) -> Any:
    return launch.engine(
        path,
        dtype="float32",
        enforce_eager=True,
        max_model_len=MAX_LEN,
        max_num_seqs=2,
        block_size=BLOCK,
        kv_cache_memory_bytes=PAGES * 2 * LAYER_PAGE,
        additional_config={"num_batched_tokens_buckets": [BATCHED], "num_seqs_buckets": [2]},
        **settings,
    )


def live_pages(llm: Any) -> list[list[int]]:
    """For each request the pages that each of its groups holds now."""
    managers = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.coordinator.single_type_managers
    requests = list(managers[0].req_to_blocks)
    return [[sum(not b.is_null for b in manager.req_to_blocks[r]) for manager in managers] for r in requests]


def test_windowed_layers_free_their_pages(tiny: Callable[..., Path], oracle: Any) -> None:
    """A cache that could not hold the request if all layers kept everything serves it, and the next from the cache."""
    from vllm import SamplingParams

    path = tiny("gemma3")
    (prompt,) = prompts_of((440,), seed=91)
    reference = oracle(path).greedy(prompt, 60)
    assert PAGES < 2 * FULL_PAGES < 3 * FULL_PAGES
    with engine(path) as llm:
        params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
        llm.llm_engine.add_request("0", {"prompt_token_ids": prompt}, params)
        most, last, outputs = [0, 0, 0], [0, 0, 0], []
        while llm.llm_engine.has_unfinished_requests():
            outputs += [output for output in llm.llm_engine.step() if output.finished]
            for counts in live_pages(llm):
                most, last = [max(pair) for pair in zip(most, counts, strict=True)], counts
        check_tokens(outputs, [reference])
        full, *windowed = sorted(most, reverse=True)
        assert full == -(-500 // BLOCK) and all(1 <= count <= WINDOW_PAGES for count in windowed), most
        # One token a step at the end: the window's tokens lie in two pages, and the tokens in flight may need a third.
        assert sorted(last)[0] <= sorted(last)[1] <= 3, last
        again = generate(llm, [prompt, prompt[:300]], 20)
        assert again[0].num_cached_tokens >= 416
        check_tokens(again, [oracle(path).greedy(prompt, 20), oracle(path).greedy(prompt[:300], 20)])


def test_the_same_memory_is_too_small_where_windows_do_not_count(tiny: Callable[..., Path]) -> None:
    with (
        pytest.raises((PilotageError, ValueError), match="KV cache"),
        engine(tiny("gemma3"), disable_hybrid_kv_cache_manager=True),
    ):
        pass
