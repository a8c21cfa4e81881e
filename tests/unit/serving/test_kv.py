"""Pages: where they lie, that no two layers of a group share a byte, and how much memory they get."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pilotage.core.errors import ConfigError
from pilotage.models.common.kv import LayerSpec
from pilotage.serving import kv

BLOCK = 4


def plan(layers: int, groups: int, num_blocks: int, page: int) -> Any:
    """Return what vLLM plans for `groups` groups of `layers` layers: equal groups overlay each other."""
    per_layer = num_blocks * page
    tensors = [
        SimpleNamespace(
            size=layers * per_layer,
            layers=[f"g{group}.l{layer}" for layer in range(layers)],
            layer_stride=per_layer,
            block_stride=page,
            offset=0,
        )
        for group in range(groups)
    ]
    described = [
        SimpleNamespace(layer_names=tensor.layers, kv_cache_spec=SimpleNamespace(block_size=BLOCK))
        for tensor in tensors
    ]
    return SimpleNamespace(num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=described)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_have_the_documented_shape_and_overlay_only_across_groups(dtype: torch.dtype) -> None:
    layers = [LayerSpec(f"g{g}.l{n}", 2, 3, dtype, None if g else 8) for g in range(2) for n in range(3)]
    specs = kv.cache_specs(layers, BLOCK)
    page = specs["g0.l0"].page_size_bytes
    assert page == 2 * 2 * 3 * BLOCK * dtype.itemsize
    caches = kv.allocate(plan(3, 2, 5, page), specs)
    for keys, values in caches.values():
        assert keys.shape == values.shape == (5, 2, BLOCK, 3)
        assert keys.dtype == dtype
        assert not keys.any()
        # To the compiler each is a tensor of its own.
        assert keys.untyped_storage()._cdata != values.untyped_storage()._cdata
    for number, name in enumerate(["g0.l0", "g0.l1", "g0.l2"], start=1):
        caches[name][0].fill_(number)
        caches[name][1].fill_(-number)
    for number, name in enumerate(["g0.l0", "g0.l1", "g0.l2"], start=1):
        assert (caches[name][0] == number).all()
        assert (caches[name][1] == -number).all()
    assert (caches["g1.l1"][0] == 2).all(), "groups share the bytes: a page has one owner at a time"


@pytest.mark.parametrize("apart", [False, True])
def test_rows_that_are_keys_and_values_at_once_are_held_once(apart: bool) -> None:
    specs = kv.cache_specs([LayerSpec(f"g0.l{n}", 1, 12, torch.float32, one_row=True) for n in range(2)], BLOCK)
    page = specs["g0.l0"].page_size_bytes
    assert page == 12 * BLOCK * 4
    config = plan(2, 1, 5, page)
    caches = kv.allocate(config, specs, apart=apart)
    for number, (keys, values) in enumerate(caches.values(), start=1):
        assert keys is values and keys.shape == (5, 1, BLOCK, 12) and not keys.any()
        keys.fill_(number)
    assert (caches["g0.l0"][0] == 1).all() and (caches["g0.l1"][0] == 2).all()
    assert kv.summary(config, caches) == {"dtype": "float32", "page_bytes": 2 * page, "groups": 1}


def test_layers_of_fewer_bytes_a_token_have_longer_pages() -> None:
    """Two heads of 4 beside one of 4: vLLM gives the second kind twice the slots, so that pages are of one size."""
    layers = [LayerSpec("g0.l0", 2, 4, torch.float32), LayerSpec("g1.l0", 1, 4, torch.float32, 8)]
    specs = kv.cache_specs(layers, BLOCK)
    config = plan(1, 2, 5, specs["g0.l0"].page_size_bytes)
    config.kv_cache_groups[1].kv_cache_spec.block_size = 2 * BLOCK
    caches = kv.allocate(config, specs)
    assert caches["g0.l0"][0].shape == (5, 2, BLOCK, 4) and caches["g1.l0"][0].shape == (5, 1, 2 * BLOCK, 4)
    caches["g1.l0"][1][-1].fill_(3.0)
    assert (caches["g0.l0"][1][-1] == 3.0).all() and not caches["g0.l0"][1][-2].any()


def test_sliding_layers_are_told_to_vllm_as_such() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    specs = kv.cache_specs([LayerSpec("a", 1, 8, torch.float32, 16), LayerSpec("b", 1, 8, torch.float32, None)], BLOCK)
    assert isinstance(specs["a"], SlidingWindowSpec)
    assert specs["a"].sliding_window == 16
    assert type(specs["b"]) is FullAttentionSpec


def _config(stated: int | None = None, share: float = 0.5) -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_memory_bytes=stated, gpu_memory_utilization=share),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )


def _specs(per_request: int) -> Any:
    return {"a": SimpleNamespace(max_memory_usage_bytes=lambda config: per_request, page_size_bytes=100)}


def test_the_cache_gets_what_the_requests_need_and_no_more_than_its_share() -> None:
    assert kv.available_bytes(_config(), _specs(1000), 10**9) == 4 * 1250 + 200
    assert kv.available_bytes(_config(), _specs(10**9), 10**9) <= 5 * 10**8
    assert kv.available_bytes(_config(stated=777), _specs(1000), 1000) == 777
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        kv.available_bytes(_config(stated=1001), _specs(1000), 1000)


@given(st.integers(1, 2**45))
def test_rounding_down_is_coarse_but_not_wasteful(count: int) -> None:
    rounded = kv.round_down(count)
    assert rounded <= count < rounded * 1.34 + 8
    assert np.log2(rounded & -rounded) >= rounded.bit_length() - 3
