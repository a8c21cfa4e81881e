"""Reorderings of a model's channels that leave the function unchanged and every sum in another order.

A clean control must differ from the reference in rounding only. Permuting hidden channels, heads or MLP channels does
just that, and needs no second implementation. Parameters are recognised by their Hugging Face names; a model with one
that is not known is refused, because a permutation that misses a tensor would plant a fault instead.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from pilotage.core.errors import Unsupported

# name -> which dimension runs over hidden channels; biases of projections into the residual stream included.
_HIDDEN_DIM = (
    (r"(.*\.)?embed_tokens\.weight|lm_head\.weight", 1),
    (r".*\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.weight", 1),
    (r".*\.(o_proj|down_proj)\.(weight|bias)", 0),
    (r"(.*\.)?(\w+layernorm|norm)\.weight", 0),
)
_NO_HIDDEN_DIM = r".*\.((q_norm|k_norm)\.weight|(q_proj|k_proj|v_proj|gate_proj|up_proj)\.bias)"


def _permute(parameter: Tensor, dim: int, order: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(parameter.index_select(dim, order))


def permute_hidden(model: Any, seed: int) -> None:
    """Permute the hidden channels of a Hugging Face causal language model in place.

    Raises:
        Unsupported: a parameter whose hidden dimension is not known; the model is then unchanged.
    """
    width = model.get_input_embeddings().weight.shape[1]
    order = torch.randperm(width, generator=torch.Generator().manual_seed(seed))
    plan: list[tuple[Tensor, int]] = []
    for name, parameter in model.named_parameters():  # tied parameters appear once
        dims = [dim for pattern, dim in _HIDDEN_DIM if re.fullmatch(pattern, name)]
        if re.fullmatch(_NO_HIDDEN_DIM, name):
            continue
        if not dims or parameter.shape[dims[0]] != width:
            raise Unsupported(f"no rule says where {name} {tuple(parameter.shape)} has hidden channels", where=name)
        plan.append((parameter, dims[0]))
    for parameter, dim in plan:
        _permute(parameter, dim, order)


def permute_inner(model: Any, seed: int) -> None:
    """Permute each MLP's inner channels and, within their groups, the attention heads, in place.

    Query heads stay with their key/value head; key/value heads are reordered with their groups.

    Raises:
        Unsupported: a layer is not made of q, k, v, o and gate, up, down projections; the model is then unchanged.
    """
    generator = torch.Generator().manual_seed(seed)
    plan: list[tuple[Tensor, int, Tensor]] = []
    for index, layer in enumerate(_layers(model)):
        try:
            attention, mlp = layer.self_attn, layer.mlp
            q, k, v, o = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
            gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
            head = int(attention.head_dim)
        except AttributeError as error:
            raise Unsupported(f"unknown structure ({error})", where=f"layers.{index}") from error
        kv_heads, queries = k.weight.shape[0] // head, q.weight.shape[0] // head
        group = queries // kv_heads
        kv_order = torch.randperm(kv_heads, generator=generator)
        q_order = torch.cat([kv * group + torch.randperm(group, generator=generator) for kv in kv_order.tolist()])
        inner = torch.randperm(gate.weight.shape[0], generator=generator)
        q_rows, kv_rows = _rows(q_order, head), _rows(kv_order, head)
        for module, rows in ((q, q_rows), (k, kv_rows), (v, kv_rows), (gate, inner), (up, inner)):
            plan.append((module.weight, 0, rows))
            if module.bias is not None:
                plan.append((module.bias, 0, rows))
        plan += [(o.weight, 1, q_rows), (down.weight, 1, inner)]
    for parameter, dim, order in plan:
        _permute(parameter, dim, order)


def _rows(heads: Tensor, head_size: int) -> Tensor:
    return (heads[:, None] * head_size + torch.arange(head_size)).reshape(-1)


def _layers(model: Any) -> Any:
    layers = getattr(model.get_decoder(), "layers", None)
    if layers is None:
        raise Unsupported("no decoder layers found", where=type(model).__name__)
    return layers
