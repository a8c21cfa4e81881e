"""The compiled CPU operators of `kernels.cpu`, offered where they are correct and faster than torch.

Same results as the definitions to rounding: sums are fp32 in another order, and attention from 16 bf16 query rows of a
request on rounds the softmax's weights to bf16. Serving only: they have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import pilotage.functional.attention
import pilotage.functional.projections
import pilotage.functional.sampling  # noqa: F401  the operators exist before implementations of them register
from pilotage.functional.domain import Domain, Limit
from pilotage.functional.padding import ends_of, likely_of, wanted_of
from pilotage.functional.registry import kernels_disabled, picking, register
from pilotage.functional.screen import screen
from pilotage.kernels import cpu

_MAX_ROWS_PLAIN = 16  # of a linear layer's input where the processor has no bf16 products
_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2, "relu": 3}  # as numbered in activation.h
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
    return torch.ops.pilotage.native_linear(x, weight, bias, ends_of(x), None)


def _o_proj(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.pilotage.native_linear(x, weight, bias, ends_of(x), wanted_of(x))


def _lm_head(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    only, copy = likely_of(), screen()
    if only is None or copy is None or bias is not None:
        return _linear(x, weight, bias)
    return torch.ops.pilotage.native_likely_linear(x, weight, ends_of(x), only, *copy.tensors())


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
    number = _ACTIVATIONS[activation]
    rows = ends_of(x), wanted_of(x)
    return torch.ops.pilotage.native_mlp(x, gate_up_weight, down_weight, gate_up_bias, down_bias, number, *rows)


def _compiled(name: str) -> Callable[..., Any]:
    """Return a function that calls a compiled operator, which is there once the library is loaded."""

    def call(*values: Any) -> Any:
        return getattr(torch.ops.pilotage, name)(*values)

    return call


def _attention_domain(*keys: str) -> Domain:
    return Domain(
        targets=("cpu",),
        dtypes=(torch.float32, torch.bfloat16),
        one_dtype=("q", *keys),
        limits={"N//K": Limit(at_most=_MAX_GROUP)},
        options={"k_scale": (None,), "v_scale": (None,)} if "k_cache" in keys else {},
        error=1.5,  # from 16 bf16 rows on the weights are rounded to bf16, as those of torch's fused attention are
        machine=cpu.unavailable,
    )


def _linear_domain(**options: tuple[str, ...]) -> Domain:
    few = Limit(at_most=_MAX_ROWS_PLAIN, why="without bf16 products torch is as fast with more rows")
    return Domain(
        targets=("cpu",),
        dtypes=(torch.bfloat16,),
        worth={} if cpu.has_bf16_products() else {"T": few},
        options=options,
        machine=cpu.unavailable,
    )


_LINEAR_DOMAIN, _MLP_DOMAIN = _linear_domain(), _linear_domain(activation=tuple(_ACTIVATIONS))
_PACKED_DOMAIN, _PAGED_DOMAIN = _attention_domain("k", "v"), _attention_domain("k_cache", "v_cache")
_ARGMAX_DOMAIN = Domain(targets=("cpu",), dtypes=(torch.float32, torch.bfloat16), machine=cpu.unavailable)
_WRITE_DOMAIN = Domain(targets=("cpu",), one_dtype=("k_cache", "v_cache", "k", "v"), machine=cpu.unavailable)

for _operator, _function in (
    ("linear", _linear),
    ("o_proj", _o_proj),
    ("lm_head", _lm_head),
    ("qkv_proj", _qkv_proj),
):
    register(_operator, "native", _function, domain=_LINEAR_DOMAIN, priority=20, language="C++")
register("mlp", "native", _mlp, domain=_MLP_DOMAIN, priority=20, language="C++")
_OPTIONS = ("scale", "window", "softcap", "sinks")
_PAGED = ("q", "k_cache", "v_cache", "block_table", "query_start_loc", "seq_lens", *_OPTIONS)
for _operator, _name, _domain, _arguments in (
    ("greedy_tokens", "native_argmax", _ARGMAX_DOMAIN, ("logits",)),
    ("write_kv", "native_write_kv", _WRITE_DOMAIN, ("k_cache", "v_cache", "k", "v", "slot_mapping")),
    ("flash_attention", "native_packed_attention", _PACKED_DOMAIN, ("q", "k", "v", "query_start_loc", *_OPTIONS)),
    ("segmented_attention", "native_paged_attention", _PAGED_DOMAIN, _PAGED),
    ("attention_decode", "native_paged_attention", _PAGED_DOMAIN, _PAGED),
):
    _picked = picking(_operator, _compiled(_name), *_arguments)
    register(_operator, "native", _picked, domain=_domain, priority=20, language="C++")
