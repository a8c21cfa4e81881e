"""What is reported as available is never more than there is, and what is allocated never more than was reported."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pilotage.models.common.kv import LayerSpec
from pilotage.serving import kv, memory

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


@pytest.fixture(scope="module")
def base(tiny: Callable[..., Path]) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=str(tiny("gemma3")), dtype="float32", max_model_len=128).create_engine_config()


def configured(base: Any, *, length: int, seqs: int, batched: int, share: float) -> Any:
    config = copy.copy(base)
    for name in ("model_config", "scheduler_config", "cache_config"):
        setattr(config, name, copy.copy(getattr(base, name)))
    config.model_config.max_model_len, config.model_config.original_max_model_len = length, length
    config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens = seqs, batched
    config.cache_config.gpu_memory_utilization, config.cache_config.kv_cache_layout = share, kv.LAYOUT
    return config


def layers_of(pattern: list[bool], windows: int, heads: int, size: int, doubled: bool, dtype: torch.dtype) -> Any:
    """Layers that see everything (True) or a window; those with one may have half the heads."""
    return [
        LayerSpec(
            f"layers.{n}.self_attn", heads if full or not doubled else 2 * heads, size, dtype, None if full else windows
        )
        for n, full in enumerate(pattern)
    ]


def planned(config: Any, specs: Any, available: int) -> Any:
    """vLLM's own plan; None where it says that this is too little for one request."""
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs

    groups = get_global_kv_cache_groups(config, [dict(specs)])
    try:
        (plan,) = get_kv_cache_configs(config, [specs], [available], groups)
    except ValueError as error:
        assert "KV cache" in str(error) or "cache blocks" in str(error), error
        return None
    return plan


def test_nothing_is_promised_that_is_not_there(base: Any) -> None:
    seen = {"planned": 0, "too small": 0, "limited": 0}

    @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(
        pattern=st.lists(st.booleans(), min_size=1, max_size=9),
        window=st.integers(2, 70),
        heads=st.integers(1, 3),
        size=st.sampled_from([8, 20, 64]),
        doubled=st.booleans(),
        dtype=st.sampled_from(DTYPES),
        block=st.sampled_from([8, 16, 32]),
        length=st.integers(16, 600),
        seqs=st.integers(1, 9),
        batched=st.integers(16, 300),
        share=st.floats(0.2, 1.0),
        much=st.floats(-0.3, 2.0),
    )
    def check(
        pattern: list[bool], window: int, heads: int, size: int, doubled: bool, dtype: torch.dtype, block: int,
        length: int, seqs: int, batched: int, share: float, much: float,
    ) -> None:  # fmt: skip
        config = configured(base, length=length, seqs=seqs, batched=batched, share=share)
        config.cache_config.block_size = block
        specs = kv.cache_specs(layers_of(pattern, window, heads, size, doubled, dtype), block)
        needed = sum(spec.max_memory_usage_bytes(config) for spec in specs.values()) * seqs
        free = int(needed * much / share)
        available = kv.available_bytes(config, specs, free)
        assert 0 <= available <= max(free, 0) * share
        plan = planned(config, specs, available)
        if plan is None:
            seen["too small"] += 1
            return
        seen["planned"] += 1
        seen["limited"] += available == kv.round_down(int(free * share))
        buffer = {tensor.size for tensor in plan.kv_cache_tensors}
        assert len(buffer) == 1 and max(buffer) <= available
        caches = kv.allocate(plan, specs)
        start = min(tensor.data_ptr() for pair in caches.values() for tensor in pair)
        end = max(t.data_ptr() + (t.shape[0] - 1) * t.stride(0) * t.element_size() + t[0].numel() * t.element_size()
                  for pair in caches.values() for t in pair)  # fmt: skip
        assert end - start <= max(buffer), "no page lies outside of the one buffer"

    check()
    assert min(seen.values()) >= 10, seen


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_that_are_all_written_take_what_was_reported(base: Any, dtype: torch.dtype) -> None:
    config = configured(base, length=512, seqs=200, batched=64, share=0.8)
    config.cache_config.block_size = 16
    specs = kv.cache_specs(layers_of([False, False, True, False], 40, 4, 64, False, dtype), 16)
    available = kv.available_bytes(config, specs, 6 * 10**7)
    plan = planned(config, specs, available)
    process = psutil.Process()
    ctypes.CDLL(None).malloc_trim(0)  # What tests before have freed is given back, or the pages might come from there.
    before = process.memory_info().rss
    caches = kv.allocate(plan, specs)
    for pair in caches.values():
        for tensor in pair:
            tensor.fill_(1.0)
    taken = process.memory_info().rss - before
    assert 0.5 * available < taken <= available + (1 << 20), (taken, available)


def test_a_step_is_counted_with_its_logits() -> None:
    model = SimpleNamespace(
        hf_text_config=SimpleNamespace(intermediate_size=300, num_attention_heads=4),
        get_hidden_size=lambda: 100,
        get_head_size=lambda: 25,
        get_vocab_size=lambda: 1000,
    )
    scheduler = SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64)
    config: Any = SimpleNamespace(model_config=model, scheduler_config=scheduler)
    one, four = memory.step_bytes(config, 1), memory.step_bytes(config, 4)
    assert one == 4 * (64 * (1200 + 1200 + 400) + 4 * 8 * 1000)
    assert four - one == 4 * 4 * 24 * 1000, "drafts add rows of logits, and here no rows of tokens"
