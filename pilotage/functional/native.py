"""The compiled CPU operators of `kernels.cpu`, offered where they are correct and faster than torch.

Same results as the definitions to rounding: sums are fp32 in another order. Serving only: they have no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import pilotage.functional.attention
import pilotage.functional.projections  # noqa: F401  the operators exist before implementations of them register
from pilotage.functional.projections import activation_function
from pilotage.functional.registry import Call, kernels_disabled, register
from pilotage.kernels import cpu

_MAX_ROWS = 16  # of a linear layer's input; from there on torch's matrix product is as fast
_MAX_GROUP = 32  # query heads that share a key head


def load_kernels() -> dict[str, str]:
    """Load the compiled kernels now; a stored graph calls them by name and would not know how to get them.

    Returns:
        For each library "loaded", or the reason why it is not.
    """
    if kernels_disabled():
        return {"cpu": "kernels are switched off by the environment"}
    return {"cpu": cpu.unavailable() or "loaded"}


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.pilotage.native_linear(x, weight, bias)


def _qkv_proj(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return _linear(x, weight, bias).split(sizes, dim=-1)


def _mlp(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str,
) -> Tensor:
    gate, up = _linear(x, gate_up_weight, gate_up_bias).chunk(2, dim=-1)
    return _linear(activation_function(activation)(gate) * up, down_weight, down_bias)


def _write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, *, slot_mapping: Tensor) -> None:
    torch.ops.pilotage.native_write_kv(k_cache, v_cache, k, v, slot_mapping)


def _flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    token_to_req: Tensor,
    positions: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    return torch.ops.pilotage.native_packed_attention(q, k, v, query_start_loc, scale, window, softcap, sinks)


def _paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    block_table: Tensor,
    token_to_req: Tensor,
    positions: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_segment_size: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    return torch.ops.pilotage.native_paged_attention(
        q, k_cache, v_cache, block_table, query_start_loc, seq_lens, scale, window, softcap, sinks
    )


def _linear_domain(call: Call) -> str | None:
    reason = call.refuse_unless(device="cpu", dtypes=(torch.bfloat16,))
    if reason is not None:
        return reason
    shape = call["x"].shape
    rows = 1
    for size in shape[:-1]:
        rows *= size
    if rows > _MAX_ROWS:
        return f"{rows} rows; from {_MAX_ROWS + 1} on torch is as fast"
    return cpu.unavailable()


def _floats(call: Call) -> set[torch.dtype]:
    return {spec.dtype for name, spec in call.tensors.items() if spec.dtype.is_floating_point and name != "sinks"}


def _attention_domain(call: Call) -> str | None:
    reason = call.refuse_unless(device="cpu", dtypes=(torch.float32, torch.bfloat16))
    if reason is not None:
        return reason
    if call.arguments.get("k_scale") is not None or call.arguments.get("v_scale") is not None:
        return "the cache has scales"
    if len(_floats(call)) > 1:
        return "queries and cache differ in dtype"
    keys: Any = call.arguments.get("k_cache") or call["k"]
    group = call["q"].shape[1] // keys.shape[1]
    if group > _MAX_GROUP:
        return f"{group} query heads share a key head; at most {_MAX_GROUP}"
    return cpu.unavailable()


def _write_domain(call: Call) -> str | None:
    reason = call.refuse_unless(device="cpu")
    if reason is not None:
        return reason
    if len(_floats(call)) > 1:
        return "new values and cache differ in dtype"
    return cpu.unavailable()


for _operator, _function in (
    ("linear", _linear),
    ("o_proj", _linear),
    ("lm_head", _linear),
    ("qkv_proj", _qkv_proj),
    ("mlp", _mlp),
):
    register(_operator, "native", _function, domain=_linear_domain, priority=20)
register("write_kv", "native", _write_kv, domain=_write_domain, priority=20)
register("flash_attention", "native", _flash_attention, domain=_attention_domain, priority=20)
register("segmented_attention", "native", _paged_attention, domain=_attention_domain, priority=20)
register("attention_decode", "native", _paged_attention, domain=_attention_domain, priority=20)
