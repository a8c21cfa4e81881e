"""Our NKI kernels as implementations of the operators: on a NeuronCore, or on the CPU where NKI_SIMULATOR=1 is set.

What depends on page tables and request boundaries is turned into rows and bounds by plain torch in the graph; the
kernels see tensors only. Each wrapped kernel's fallback computes the same from the same arguments.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import pilotage.functional.attention
import pilotage.functional.moe
import pilotage.functional.norm
import pilotage.functional.projections
import pilotage.functional.rotary  # noqa: F401  the operators exist before implementations of them register
from pilotage.functional.attention import _accumulate, _finish, real_tokens
from pilotage.functional.call import Call
from pilotage.functional.domain import Domain, Emulator, Limit
from pilotage.functional.moe import expert_affinities
from pilotage.functional.projections import ACTIVATIONS, activation_function
from pilotage.functional.registry import picking, register
from pilotage.functional.rotary import _rotate
from pilotage.kernels.nki import library, simulating
from pilotage.kernels.sharding import Sharding
from pilotage.kernels.wrap import wrap_nki

_PADDED_QUERY, _PADDED_KEY = -2, -1
_PRIORITY = 30


def _fallback_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def _fallback_rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool, round_once: bool) -> Tensor:
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return (weight.float() * normed).to(x.dtype) if round_once else weight * normed.to(x.dtype)


def _fallback_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _rotate(q, cos[:, None], sin[:, None]), _rotate(k, cos[:, None], sin[:, None])


def _fallback_mlp(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
) -> Tensor:
    gate, up = F.linear(x, gate_up_weight, gate_up_bias).chunk(2, dim=-1)
    return F.linear(activation_function(activation)(gate) * up, down_weight, down_bias)


def _fallback_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tensor,
    keys: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    visible = (queries[:, :1] == keys[:1]) & (keys[1:] <= queries[:, 1:])
    if window:
        visible = visible & (keys[1:] + window > queries[:, 1:])
    state = _accumulate(None, q, k[None], v[None], visible[None], scale, softcap or None)
    return _finish(state, sinks, q)


def _fallback_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: Tensor,
    bounds: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
) -> Tensor:
    _, heads, slots, size = k_cache.shape
    every = rows[:, :, None] + torch.arange(heads, device=rows.device) * slots
    k, v = (cache.reshape(-1, size)[every] for cache in (k_cache, v_cache))
    at = torch.arange(rows.shape[1], device=rows.device)
    visible = (at >= bounds[:, :1]) & (at < bounds[:, 1:])
    state = _accumulate(None, q[:, None], k, v, visible[:, None], scale, softcap or None)
    return _finish(state, sinks, q[:, None])[:, 0]


def _fallback_write(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> None:
    size = k_cache.shape[-1]
    kept = rows >= 0
    safe = torch.where(kept, rows, 0).long()
    for cache, new in ((k_cache, k), (v_cache, v)):
        flat = cache.view(-1, size)
        flat[safe] = torch.where(kept[..., None], new.to(cache.dtype), flat[safe])


def _fallback_router(logits: Tensor, top_k: int, rule: str, renormalize: bool) -> Tensor:
    definition = expert_affinities.__wrapped__  # type: ignore[attr-defined]  # not the dispatched one
    out: Tensor = definition(logits, top_k=top_k, rule=rule, renormalize=renormalize)
    return out


_BY_ROWS = Sharding(tensors={"x": "T D", "weight": "D"}, results=("T D",), split=("T",))
_BY_PROJECTION = Sharding(
    tensors={"x": "T D", "weight": "F D", "bias": "F"}, results=("T F",), split=("T", "F"), sums=("D",)
)
_BY_TOKENS = Sharding(
    tensors={"q": "T N H", "k": "T K H", "cos": "T R", "sin": "T R"}, results=("T N H", "T K H"), split=("T",)
)
_MLP_BY_ROWS = Sharding(
    tensors={
        "x": "T D",
        "gate_up_weight": "G D",
        "down_weight": "D F",
        "gate_up_bias": "G",
        "down_bias": "D",
    },
    results=("T D",),
    split=("T",),
)

_LINEAR = wrap_nki(library.linear, _fallback_linear, name="nki_linear", sharding=_BY_PROJECTION)
_NORM = wrap_nki(library.rms_norm, _fallback_rms_norm, name="nki_rms_norm", sharding=_BY_ROWS)
_ROTARY = wrap_nki(library.rotary, _fallback_rotary, name="nki_rotary", sharding=_BY_TOKENS)
_MLP = wrap_nki(library.mlp, _fallback_mlp, name="nki_mlp", sharding=_MLP_BY_ROWS)
_FLASH = wrap_nki(library.flash_attention, _fallback_flash, name="nki_flash_attention")
_DECODE = wrap_nki(library.attention_decode, _fallback_decode, name="nki_attention_decode")
_WRITE = wrap_nki(library.write_kv, _fallback_write, name="nki_write_kv", mutates_args=("k_cache", "v_cache"))
_ROUTER = wrap_nki(library.router, _fallback_router, name="nki_router")


def _rms_norm(x: Tensor, weight: Tensor, *, eps: float, unit_offset: bool = False, round_once: bool = False) -> Tensor:
    return _NORM(x.reshape(-1, x.shape[-1]), weight, eps, unit_offset, round_once).reshape(x.shape)


def _rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    flat = [one.expand(*q.shape[:-2], one.shape[-1]).reshape(-1, one.shape[-1]) for one in (cos, sin)]
    turned = _ROTARY(q.reshape(-1, *q.shape[-2:]), k.reshape(-1, *k.shape[-2:]), *flat)
    return turned[0].reshape(q.shape), turned[1].reshape(k.shape)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _LINEAR(x.reshape(-1, x.shape[-1]), weight, bias).reshape(*x.shape[:-1], weight.shape[0])


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
    flat = x.reshape(-1, x.shape[-1])
    return _MLP(flat, gate_up_weight, down_weight, gate_up_bias, down_bias, activation).reshape(x.shape)


def _write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, *, slot_mapping: Tensor) -> None:
    _, heads, slots, _ = k_cache.shape
    first = slot_mapping // slots * (heads * slots) + slot_mapping % slots
    rows = first[:, None] + torch.arange(heads, device=first.device) * slots
    _WRITE(k_cache, v_cache, k, v, torch.where(slot_mapping[:, None] >= 0, rows, -1).to(torch.int32))


def _flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    token_to_req: Tensor,
    positions: Tensor,
    query_start_loc: Tensor,
    *options: Any,
) -> Tensor:
    real = real_tokens(q, query_start_loc)
    queries = torch.stack((torch.where(real, token_to_req, _PADDED_QUERY), positions), dim=1).float()
    keys = torch.stack((torch.where(real, token_to_req, _PADDED_KEY), positions)).float()
    scale, window, softcap, sinks = options
    return _FLASH(q, k, v, queries, keys, None if sinks is None else sinks.float(), scale, window or 0, softcap or 0.0)


def _attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    token_to_req: Tensor,
    positions: Tensor,
    query_start_loc: Tensor,
    block_table: Tensor,
    *options: Any,
) -> Tensor:
    scale, window, softcap, sinks = options
    pages, heads, slots, _ = k_cache.shape
    owned = block_table[token_to_req].clamp(0, pages - 1)  # what belongs to nobody may be anything
    rows = (owned[:, :, None] * (heads * slots) + torch.arange(slots, device=q.device)).flatten(1).to(torch.int32)
    real = real_tokens(q, query_start_loc)
    last = torch.where(real, positions, 0).float() + 1
    first = torch.zeros_like(last) if window is None else (last - window).clamp(min=0)
    bounds = torch.stack((first, last), dim=1)
    floats = None if sinks is None else sinks.float()
    return _DECODE(q, k_cache, v_cache, rows, bounds, floats, scale, softcap or 0.0)


def _expert_affinities(logits: Tensor, top_k: int, rule: str, renormalize: bool) -> Tensor:
    return _ROUTER(logits.reshape(-1, logits.shape[-1]), top_k, rule, renormalize).reshape(logits.shape)


_EMULATOR = Emulator(name="the NKI interpreter", how="NKI_SIMULATOR=1", active=simulating)
_DTYPES = (torch.float32, torch.bfloat16)
_ROW = Limit(at_most=8192, why="a row lies in one partition of SBUF, with what is made of it")


def _domain(*tensors: str, limits: dict[str, Limit], **more: object) -> Domain:
    return Domain(targets=("neuron",), dtypes=_DTYPES, one_dtype=tensors, limits=limits, emulator=_EMULATOR, **more)  # type: ignore[arg-type]


def _one_shape_of_angles(call: Call) -> str | None:
    odd = call["cos"].shape[-1] % 2
    return f"{call['cos'].shape[-1]} channels turn, and they turn in pairs" if odd else None


_BATCH = ("token_to_req", "positions", "query_start_loc")
_OPTIONS = ("scale", "window", "softcap", "sinks")
_ATTENTION = {
    "H": Limit(at_most=512, why="values of a tile fill one bank of PSUM"),
    "N//K": Limit(at_most=128, why="query heads that share a key head are the rows of one tile"),
}
register(
    "rms_norm",
    "nki",
    _rms_norm,
    domain=_domain("x", "weight", limits={"D": _ROW}, sharding=_BY_ROWS),
    priority=_PRIORITY,
    language="NKI",
)
register(
    "rotary",
    "nki",
    _rotary,
    domain=_domain(
        "q", "k", "cos", "sin", limits={"N*H": _ROW, "K*H": _ROW}, other=_one_shape_of_angles, sharding=_BY_TOKENS
    ),
    priority=_PRIORITY,
    language="NKI",
)
for _name, _function in (("qkv_proj", _qkv_proj), ("o_proj", _linear)):
    register(
        _name,
        "nki",
        _function,
        domain=_domain("x", "weight", "bias", limits={"D": _ROW}, error=2.0, sharding=_BY_PROJECTION),
        priority=_PRIORITY,
        language="NKI",
    )
register(
    "mlp",
    "nki",
    _mlp,
    domain=_domain(
        "x",
        "gate_up_weight",
        "down_weight",
        "gate_up_bias",
        "down_bias",
        limits={"D": _ROW, "F": _ROW},
        options={
            "activation": tuple(one for one in ACTIVATIONS if one in ("silu", "gelu", "gelu_pytorch_tanh", "relu"))
        },
        error=2.0,
        sharding=_MLP_BY_ROWS,
    ),
    priority=_PRIORITY,
    language="NKI",
)
register(
    "write_kv",
    "nki",
    _write_kv,
    domain=_domain("k", "v", limits={"H": _ROW}),
    priority=_PRIORITY,
    language="NKI",
)
register(
    "flash_attention",
    "nki",
    picking("flash_attention", _flash_attention, "q", "k", "v", *_BATCH, *_OPTIONS),
    domain=_domain(
        "q", "k", "v", limits={**_ATTENTION, "T": Limit(at_most=4096, why="the keys of a head stay in SBUF")}
    ),
    priority=_PRIORITY,
    language="NKI",
)
register(
    "attention_decode",
    "nki",
    picking("attention_decode", _attention_decode, "q", "k_cache", "v_cache", *_BATCH, "block_table", *_OPTIONS),
    domain=_domain("q", "k_cache", "v_cache", limits=_ATTENTION, options={"k_scale": (None,), "v_scale": (None,)}),
    priority=_PRIORITY,
    language="NKI",
)
register(
    "segmented_attention",
    "nki",
    picking("segmented_attention", _attention_decode, "q", "k_cache", "v_cache", *_BATCH, "block_table", *_OPTIONS),
    domain=_domain(
        "q",
        "k_cache",
        "v_cache",
        limits=_ATTENTION,
        worth={"T": Limit(at_most=64, why="the kernel of attention_decode, a token at a time")},
        options={"k_scale": (None,), "v_scale": (None,)},
    ),
    priority=_PRIORITY,
    language="NKI",
)
register(
    "router_logits",
    "nki",
    picking("router_logits", _linear, "hidden_states", "weight", "bias"),
    domain=_domain("hidden_states", "weight", "bias", limits={"D": _ROW}, error=2.0, sharding=_BY_PROJECTION),
    priority=_PRIORITY,
    language="NKI",
)
register(
    "expert_affinities",
    "nki",
    picking("expert_affinities", _expert_affinities, "logits", "top_k", "rule", "renormalize"),
    domain=_domain(
        "logits",
        limits={"E": Limit(at_least=8, at_most=8192, why="the vector engine searches 8 at least")},
        options={"rule": ("softmax_topk", "topk_softmax"), "correction": (None,), "scale": (1.0,)},
        error=2.0,
    ),
    priority=_PRIORITY,
    language="NKI",
)
