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
    (r".*\.(q_proj|k_proj|v_proj|gate_proj|up_proj|q_a_proj|kv_a_proj_with_mqa)\.weight", 1),
    (r".*\.(o_proj|down_proj)\.(weight|bias)", 0),
    (r".*\.(gate|router)\.weight", 1),
    (r".*\.(per_layer_input_gate|per_layer_model_projection)\.weight", 1),
    (r".*\.per_layer_projection\.weight", 0),
    (r".*\.experts\.down_proj_bias", 1),
    (r"(.*\.)?(\w+layernorm|norm|post_per_layer_input_norm)\.weight", 0),
)
_NO_HIDDEN_DIM = (
    r".*\.((q_norm|k_norm|q_a_layernorm|kv_a_layernorm|q_b_proj|kv_b_proj)\.weight|(q_proj|k_proj|v_proj|gate_proj|up_proj|router)\.bias"
    r"|embed_tokens_per_layer\.weight|per_layer_projection_norm\.weight|sinks|experts\.gate_up_proj_bias)"
)


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
        if re.fullmatch(r".*\.experts\.(gate_up_proj|down_proj)", name):
            inputs_first = _inputs_first(model.get_submodule(name.rpartition(".")[0]), name, width)
            dims = [1 if inputs_first == name.endswith("gate_up_proj") else 2]
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
    # Where layers read keys and values of others, their order is left alone.
    shared = any(getattr(layer.self_attn, "is_kv_shared_layer", False) for layer in _layers(model))
    for index, layer in enumerate(_layers(model)):
        try:
            if hasattr(layer.self_attn, "kv_b_proj"):
                plan += _latent_heads(layer.self_attn, generator)
            else:
                plan += _heads(layer.self_attn, generator, queries_only=shared)
            plan += _inner_channels(layer.mlp, model.get_input_embeddings().weight.shape[1], generator)
        except AttributeError as error:
            raise Unsupported(f"unknown structure ({error})", where=f"layers.{index}") from error
    for parameter, dim, order in plan:
        _permute(parameter, dim, order)


def _heads(
    attention: Any, generator: torch.Generator, *, queries_only: bool = False
) -> list[tuple[Tensor, int, Tensor]]:
    """Plan the permutation of key/value heads, unless `queries_only`, and of the query heads of each."""
    q, o = attention.q_proj, attention.o_proj
    head = int(attention.head_dim)
    queries, group = q.weight.shape[0] // head, int(attention.num_key_value_groups)
    kv_heads = queries // group
    kv_order = torch.arange(kv_heads) if queries_only else torch.randperm(kv_heads, generator=generator)
    q_order = torch.cat([kv * group + torch.randperm(group, generator=generator) for kv in kv_order.tolist()])
    q_rows, kv_rows = _rows(q_order, head), _rows(kv_order, head)
    found = [(o.weight, 1, q_rows)]
    moved = [(q, q_rows)] if queries_only else [(q, q_rows), (attention.k_proj, kv_rows), (attention.v_proj, kv_rows)]
    for module, rows in moved:
        found.append((module.weight, 0, rows))
        if module.bias is not None:
            found.append((module.bias, 0, rows))
    if getattr(attention, "sinks", None) is not None:
        found.append((attention.sinks, 0, q_order))
    return found


def _latent_heads(attention: Any, generator: torch.Generator) -> list[tuple[Tensor, int, Tensor]]:
    """Plan the permutation of the heads of latent attention, which share keys and values before their expansion."""
    q = attention.q_proj if attention.q_lora_rank is None else attention.q_b_proj
    value = int(attention.v_head_dim)
    heads = attention.o_proj.weight.shape[1] // value
    order = torch.randperm(heads, generator=generator)
    return [
        (q.weight, 0, _rows(order, q.weight.shape[0] // heads)),
        (attention.kv_b_proj.weight, 0, _rows(order, attention.kv_b_proj.weight.shape[0] // heads)),
        (attention.o_proj.weight, 1, _rows(order, value)),
    ]


def _inner_channels(mlp: Any, hidden_size: int, generator: torch.Generator) -> list[tuple[Tensor, int, Tensor]]:
    """Plan the permutation of an MLP's inner channels, or of all its experts' alike."""
    experts = getattr(mlp, "experts", None)
    if experts is None:
        inner = torch.randperm(mlp.gate_proj.weight.shape[0], generator=generator)
        found = [(mlp.gate_proj.weight, 0, inner), (mlp.up_proj.weight, 0, inner), (mlp.down_proj.weight, 1, inner)]
        return found + [(part.bias, 0, inner) for part in (mlp.gate_proj, mlp.up_proj) if part.bias is not None]
    inputs_first = _inputs_first(experts, "experts", hidden_size)
    size = experts.down_proj.shape[1 if inputs_first else 2]
    inner = torch.randperm(size, generator=generator)
    # Stored with inputs first, gate and up alternate (gpt-oss); else gate's rows come first.
    both = (2 * inner[:, None] + torch.arange(2)).flatten() if inputs_first else torch.cat((inner, inner + size))
    found = [
        (experts.gate_up_proj, 2 if inputs_first else 1, both),
        (experts.down_proj, 1 if inputs_first else 2, inner),
    ]
    if (shared := getattr(mlp, "shared_experts", None)) is not None:
        found += _inner_channels(shared, hidden_size, generator)
    bias = getattr(experts, "gate_up_proj_bias", None)
    return found if bias is None else [*found, (bias, 1, both)]


def _inputs_first(experts: Any, name: str, hidden_size: int) -> bool:
    """Whether experts' weights are [E, in, out]; told by where gate_up_proj has the hidden size.

    Raises:
        Unsupported: both or none of the two have that size.
    """
    shape = experts.gate_up_proj.shape
    found = [size == hidden_size for size in shape[1:]]
    if len(shape) != 3 or sum(found) != 1:
        raise Unsupported(f"the layout of gate_up_proj {tuple(shape)} is not known", where=name)
    return found[0]


def _rows(heads: Tensor, head_size: int) -> Tensor:
    return (heads[:, None] * head_size + torch.arange(head_size)).reshape(-1)


def _layers(model: Any) -> Any:
    layers = getattr(model.get_decoder(), "layers", None)
    if layers is None:
        raise Unsupported("no decoder layers found", where=type(model).__name__)
    return layers
