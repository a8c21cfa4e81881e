"""The KV cache: slots, page tables, lengths, precision; what only batches, chunks, decode or padding show."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pilotage.accuracy.faults.fault import Fault, Patch, Plant, attends

_cache = partial(Fault, heading="KV cache, buckets, graphs", where=("*.self_attn.kv", "*.self_attn.heads"))


def _meta(change: Callable[[dict[str, Any], Tensor], None], phase: str | None = None) -> Plant:
    def edit(layer: Any, meta: dict[str, Any], options: dict[str, Any]) -> None:
        change(meta, options["positions"])

    return attends(edit, phase=phase)


def _late_page(meta: dict[str, Any], positions: Tensor) -> None:
    """The first token of every later page goes one slot too far."""
    slots, size = meta["slot_mapping"].clone(), meta["block_size"]
    late = (slots >= 0) & (positions > 0) & (positions % size == 0)
    slots[late] += 1
    meta["slot_mapping"] = slots


def _exchanged_tables(meta: dict[str, Any], positions: Tensor) -> None:
    if int((meta["query_start_loc"].diff() > 0).sum()) >= 2:
        table = meta["block_table_tensor"].clone()
        table[[0, 1]] = table[[1, 0]]
        meta["block_table_tensor"] = table


def _padding_written(meta: dict[str, Any], positions: Tensor) -> None:
    slots = meta["slot_mapping"].clone()
    slots[slots < 0] = slots[0].clone()
    meta["slot_mapping"] = slots


def _shorter(meta: dict[str, Any], positions: Tensor) -> None:
    meta["seq_lens"] = (meta["seq_lens"] - 1).clamp(min=1)


def _first_page_of_another(meta: dict[str, Any], positions: Tensor) -> None:
    """A page table whose first column belongs to the request before."""
    table, real = meta["block_table_tensor"].clone(), int((meta["query_start_loc"].diff() > 0).sum())
    table[:real, 0] = table[:real, 0].roll(1)
    meta["block_table_tensor"] = table


def _boundary(meta: dict[str, Any], positions: Tensor) -> None:
    """The first token of the second request is taken for the last of the first."""
    starts = meta["query_start_loc"].clone()
    if meta["max_query_len"] > 1 and int((starts.diff() > 0).sum()) >= 2:
        starts[1] += 1
        meta["query_start_loc"] = starts


def _zero_keys(layer: Any, meta: dict[str, Any], options: dict[str, Any]) -> None:
    options["k"] = torch.zeros_like(options["k"])


def _last_slot_zero(layer: Any, meta: dict[str, Any], options: dict[str, Any]) -> None:
    last = options["positions"] % meta["block_size"] == meta["block_size"] - 1
    options["v"] = torch.where(last[:, None, None], 0.0, options["v"])


def _fp8(layer: Any, meta: dict[str, Any], options: dict[str, Any]) -> None:
    for name in "kv":
        options[name] = options[name].to(torch.float8_e4m3fn).to(options[name].dtype)


def _one_layer(layer: Any, meta: dict[str, Any], options: dict[str, Any]) -> None:
    """One layer of a group reads the keys of the step before: its newest one is missing."""
    if layer.layer_name == "layers.2.self_attn":
        meta["seq_lens"] = (meta["seq_lens"] - 1).clamp(min=1)


def _late_value(layer: Any, meta: dict[str, Any], options: dict[str, Any]) -> None:
    """In decode the value of a token is the one of the token before it in the batch."""
    real = int(meta["query_start_loc"][-1])
    v = options["v"].clone()
    v[:real] = v[:real].roll(1, 0)
    options["v"] = v


def _four_columns(meta: dict[str, Any], positions: Tensor) -> None:
    """A page table cut to four columns: what lies behind them is read from the first page."""
    table = meta["block_table_tensor"].clone()
    table[:, 4:] = table[:, :1]
    meta["block_table_tensor"] = table


def _keys_in_bf16(layer: Any, meta: dict[str, Any], options: dict[str, Any]) -> None:
    options["k"] = options["k"].bfloat16().to(options["k"].dtype)


def _chunk_over_its_prefix(meta: dict[str, Any], positions: Tensor) -> None:
    """The last token of a chunk is written where the first one of its request is."""
    slots, real = meta["slot_mapping"].clone(), int((meta["query_start_loc"].diff() > 0).sum())
    for request in range(real):
        last = int(meta["query_start_loc"][request + 1]) - 1
        slots[last] = int(meta["block_table_tensor"][request, 0]) * meta["block_size"]
    meta["slot_mapping"] = slots


def _one_cache_for_two(patch: Patch) -> None:
    """Two layers of a kind write to the same pages."""
    from pilotage.models.common.causal_lm import CausalLM

    real = CausalLM.__dict__["bind_kv_cache"]

    def bind(self: Any, pages: Any) -> None:
        real(self, pages)
        layers = self.attention_layers()
        layers[3].kv_cache = layers[1].kv_cache

    patch.set(CausalLM, "bind_kv_cache", bind)


FAULTS = (
    _cache(name="first slot of later pages one off", model="llama3", only="long", plant=_meta(_late_page)),
    _cache(
        name="page tables of two requests exchanged in decode",
        model="qwen3",
        only="batch",
        plant=_meta(_exchanged_tables, "decode"),
    ),
    _cache(name="padding writes the first slot", model="gemma3", only="padding", plant=_meta(_padding_written)),
    _cache(name="newest key not seen in decode", model="gemma2", only="decode", plant=_meta(_shorter, "decode")),
    _cache(
        name="newest key not seen in decode, one layer",
        model="qwen3_moe",
        only="decode",
        plant=attends(_one_layer, phase="decode"),
    ),
    _cache(
        name="first page of another request in a chunk",
        model="mixtral",
        only="chunk",
        plant=_meta(_first_page_of_another, "chunk"),
    ),
    _cache(name="boundary of two packed requests one off", model="mistral", only="batch", plant=_meta(_boundary)),
    _cache(
        name="keys written as zeros in decode",
        model="gpt_oss",
        only="decode",
        plant=attends(_zero_keys, phase="decode"),
    ),
    _cache(name="last slot of a page left zero", model="qwen2", only="long", plant=attends(_last_slot_zero)),
    _cache(
        name="values of another row in decode", model="qwen2", only="batch", plant=attends(_late_value, phase="decode")
    ),
    _cache(name="page table cut", model="llama3", only="long", plant=_meta(_four_columns)),
    _cache(name="keys rounded to bf16", model="qwen3", plant=attends(_keys_in_bf16)),
    _cache(
        name="end of a chunk written over the beginning",
        model="mistral",
        only="chunk",
        plant=_meta(_chunk_over_its_prefix, "chunk"),
    ),
    _cache(name="two layers in the same pages", model="gemma3", only="decode", plant=_one_cache_for_two),
    _cache(name="cache rounded to fp8", model="mixtral", plant=attends(_fp8)),
)
