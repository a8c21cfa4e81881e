"""The paged KV cache: what the model asks for, in vLLM's terms, and the pages it is given.

A layer's page holds its keys, then its values, each [num_kv_heads, block_size, head_size] (HND), or, where one row is
both, those rows once. Layers of different groups may share bytes: vLLM hands every page to one group at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pilotage.core.errors import ConfigError
from pilotage.serving.batch import LayerGroup

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig

LAYOUT = "LBHNC"
_ALIGNMENT = 64  # bytes: a cache line
# Pages beyond what the running requests can need, kept for the prefix cache.
PREFIX_CACHE_SHARE = 0.25


def cache_specs(layers: Iterable[Any], block_size: int) -> dict[str, AttentionSpec]:
    """Translate the model's layer specs (`models.common.kv.LayerSpec`) for vLLM."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    specs: dict[str, AttentionSpec] = {}
    for layer in layers:
        shape: dict[str, Any] = {
            "block_size": block_size,
            "num_kv_heads": layer.num_kv_heads,
            "head_size": layer.head_size,
            "dtype": layer.dtype,
            "head_size_v": 0 if layer.one_row else layer.head_size,
        }
        if layer.sliding_window is None:
            specs[layer.name] = FullAttentionSpec(**shape)
        else:
            specs[layer.name] = SlidingWindowSpec(**shape, sliding_window=layer.sliding_window)
    return specs


def layer_groups(config: KVCacheConfig, max_model_len: int) -> list[LayerGroup]:
    """Return the groups of layers that share a block table, in vLLM's order."""
    return [
        LayerGroup(
            layer_names=tuple(group.layer_names),
            block_size=group.kv_cache_spec.block_size,
            max_blocks_per_seq=math.ceil(max_model_len / group.kv_cache_spec.block_size),
        )
        for group in config.kv_cache_groups
    ]


def allocate(
    config: KVCacheConfig,
    specs: Mapping[str, AttentionSpec],
    device: torch.device | None = None,
    *,
    apart: bool = False,
) -> dict[str, list[Tensor]]:
    """Allocate the pages.

    Args:
        config: vLLM's plan: one buffer, and where each layer's pages lie in it.
        specs: by layer name.
        device: where they lie; None for host memory.
        apart: give every layer memory of its own, where a compiler might write a whole cache back; no two layers of the
            plan may share bytes then.

    Returns:
        Layer name -> [keys, values], each [num_blocks, num_kv_heads, slots, head_size], zeroed; the same tensor twice
        where a row is both. The operating system commits the memory page by page as it is first written.
    """
    # Where layers differ in bytes a token, vLLM gives those with fewer longer pages, so that all pages are equal.
    slots_of = {name: group.kv_cache_spec.block_size for group in config.kv_cache_groups for name in group.layer_names}
    if apart:
        if len(config.kv_cache_groups) > 1:
            raise AssertionError("layers of several groups share bytes")
        return {
            name: _pair(
                torch.zeros(
                    (config.num_blocks, spec.num_kv_heads, slots_of[name], spec.head_size),
                    dtype=spec.dtype,
                    device=device,
                )
                for _ in range(_tensors(spec))
            )
            for name, spec in specs.items()
        }
    (num_bytes,) = {tensor.size for tensor in config.kv_cache_tensors}
    buffer = _bytes(num_bytes) if device is None or device.type == "cpu" else _device_bytes(num_bytes, device)
    caches: dict[str, list[Tensor]] = {}
    for tensor in config.kv_cache_tensors:
        for index, name in enumerate(tensor.layers):
            spec = specs[name]
            heads, slots, size = spec.num_kv_heads, slots_of[name], spec.head_size
            item = spec.dtype.itemsize
            start, stride = tensor.offset + index * tensor.layer_stride, tensor.block_stride
            if start % item or stride % item:
                raise AssertionError(f"{name}: pages at byte {start}, stride {stride} are not aligned to {spec.dtype}")
            shape = (config.num_blocks, heads, slots, size)
            strides = (stride // item, slots * size, size, 1)
            length = heads * slots * size * item
            # Each view gets a storage object of its own over these bytes. As views of one storage they would be
            # aliases to the compiler, which then copies whole caches around every write; they never share an element
            # that two layers use at a time.
            firsts = range(start, start + length * _tensors(spec), length)
            caches[name] = _pair(buffer(first).view(spec.dtype).as_strided(shape, strides) for first in firsts)
    return caches


def _tensors(spec: AttentionSpec) -> int:
    """Return how many tensors a layer has: keys and values, or rows that are both."""
    return 2 if spec.head_size_v else 1


def _pair(pages: Iterable[Tensor]) -> list[Tensor]:
    found = list(pages)
    return found * (2 // len(found))


def summary(config: KVCacheConfig, caches: Mapping[str, Sequence[Tensor]]) -> dict[str, Any]:
    """Return how keys and values are stored, and what a page takes of all layers that share a block table, in bytes."""
    dtypes = {str(keys.dtype).removeprefix("torch.") for keys, _ in caches.values()}
    groups = [
        sum(
            pages[0].numel() * pages.element_size()
            for name in group.layer_names
            for pages in {id(pages): pages for pages in caches[name]}.values()
        )
        for group in config.kv_cache_groups
    ]
    return {"dtype": ", ".join(sorted(dtypes)), "page_bytes": max(groups), "groups": len(groups)}


def _bytes(count: int) -> Callable[[int], Tensor]:
    """Return a function that gives zeroed host memory from a byte on, each time as a storage of its own."""
    raw = np.zeros(count + _ALIGNMENT, dtype=np.uint8)
    skip = -raw.ctypes.data % _ALIGNMENT
    whole = raw[skip : skip + count]
    return lambda first: torch.from_numpy(whole[first:])


def _device_bytes(count: int, device: torch.device) -> Callable[[int], Tensor]:
    """As `_bytes`, on a device; a view that has gone through DLPack has a storage of its own."""
    whole = torch.zeros(count, dtype=torch.uint8, device=device)
    return lambda first: torch.from_dlpack(whole[first:])


def available_bytes(vllm_config: VllmConfig, specs: Mapping[str, AttentionSpec], free_bytes: int) -> int:
    """Return how many bytes this rank's KV cache gets.

    Enough for `max_num_seqs` requests of `max_model_len` tokens and a share for the prefix cache, but at most
    `gpu_memory_utilization` of the free memory. The size becomes part of every compiled graph, so where memory is the
    limit it is rounded down coarsely: a few megabytes more or less free must not compile everything again.

    Args:
        vllm_config: vLLM's configuration.
        specs: this rank's layers.
        free_bytes: memory that this rank may still use.

    Raises:
        ConfigError: the user's `kv_cache_memory_bytes` is more than there is.
    """
    stated = vllm_config.cache_config.kv_cache_memory_bytes
    if stated:
        if stated > free_bytes:
            raise ConfigError(
                f"{stated:,} bytes are more than the {free_bytes:,} free on this machine for one rank",
                where="kv_cache_memory_bytes",
                do="lower it",
            )
        return stated
    per_request = sum(spec.max_memory_usage_bytes(vllm_config) for spec in specs.values())
    wanted = math.ceil(per_request * vllm_config.scheduler_config.max_num_seqs * (1 + PREFIX_CACHE_SHARE))
    wanted += 2 * sum(spec.page_size_bytes for spec in specs.values())  # page 0, and rounding between groups
    limit = int(max(free_bytes, 0) * vllm_config.cache_config.gpu_memory_utilization)
    return wanted if wanted <= limit else round_down(limit)


def round_down(count: int) -> int:
    """Round down to three significant binary digits."""
    step = 1 << max(count.bit_length() - 3, 0)
    return count // step * step
