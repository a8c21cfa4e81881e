"""Faults that one rank does not have: how weights, heads, vocabulary and sums are divided over two."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from pilotage.accuracy.faults.fault import Fault, Patch, loads, method

_tp = partial(Fault, heading="GQA / tensor-parallel layout / fused weights", only="tensor parallel", ranks=2)


def _row_parallel() -> Any:
    from pilotage.nn import RowParallelLinear

    return RowParallelLinear


def _contiguous(patch: Patch) -> None:
    """Rank r takes the r-th half of [gate; up]: all of gate, or all of up."""
    from pilotage.nn import experts
    from pilotage.weights import sharding_weight_loader

    def loader(dim: int, inner: int, ranks: int, interleaved: bool) -> Any:
        return sharding_weight_loader(dim, 2 * inner, ranks)

    patch.set(experts, "_gate_up_loader", loader)


def _bias_on_every_rank(real: Any, self: Any, partial_sum: Tensor) -> Tensor:
    from pilotage.parallel import leave

    return leave(partial_sum if self.bias is None else partial_sum + self.bias)


def _from_rank_0(*names: str) -> Any:
    import torch.distributed as dist

    def edit(model: Any) -> None:
        for layer in model.model.layers:
            for name in names:
                tensor = dict(layer.named_parameters())[name].data.contiguous()
                dist.broadcast(tensor, 0)
                dict(layer.named_parameters())[name].data.copy_(tensor)

    return loads(edit)


def _not_summed(model: Any) -> None:
    projection = model.model.layers[1].self_attn.o_proj
    projection.reduce = lambda partial_sum: partial_sum


def _down_bias_on_every_rank(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.experts.adds_bias = True


def _vocabulary_one_off(model: Any) -> None:
    embedding = model.model.embed_tokens
    embedding.first_id = embedding.first_id - embedding.group.rank


def _half_of_each_head(model: Any) -> None:
    """Heads of the output projection's columns in another order than those of the queries."""
    for layer in model.model.layers:
        weight, size = layer.self_attn.o_proj.weight, layer.self_attn.head_size
        heads = weight.view(weight.shape[0], -1, size)
        weight.copy_(heads.roll(1, 1).reshape(weight.shape).clone())


def _head_shards(model: Any) -> None:
    """Logits of the ranks gathered in the other order."""
    head = model.lm_head
    real = head.gather

    def gather(share: Tensor) -> Tensor:
        return torch.cat(real(share).chunk(2, -1)[::-1], -1)

    head.gather = gather


def _mlp_not_summed(model: Any) -> None:
    model.model.layers[2].mlp.down_proj.reduce = lambda partial_sum: partial_sum


def _first_bias(model: Any) -> None:
    import torch.distributed as dist

    for layer in model.model.layers:
        bias = layer.self_attn.q_proj.bias
        tensor = bias.data.contiguous()
        dist.broadcast(tensor, 0)
        bias.data.copy_(tensor)


def _shares_of_the_latents_keys(model: Any) -> None:
    """Each rank has the other's heads of what makes keys and values."""
    import torch.distributed as dist

    for layer in model.model.layers:
        weight = layer.self_attn.kv_b_proj.weight
        parts = [torch.empty_like(weight.data) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, weight.data.contiguous())
        weight.data.copy_(parts[1 - dist.get_rank()])


FAULTS = (
    _tp(
        name="fused gate and up divided contiguously",
        model="qwen3_moe",
        where=("*.mlp.experts", "*.mlp"),
        plant=_contiguous,
    ),
    _tp(
        name="bias of the output projection added by every rank",
        model="gpt_oss",
        where=("*.self_attn.o_proj",),
        plant=method(_row_parallel, "reduce", _bias_on_every_rank),
    ),
    _tp(
        name="every rank holds the first key/value head",
        model="qwen3",
        where=("*.self_attn.[kv]_proj", "*.self_attn.k_norm"),
        plant=_from_rank_0("self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    ),
    _tp(
        name="one layer's output not summed",
        model="llama3",
        where=("model.layers.1.self_attn.o_proj",),
        plant=loads(_not_summed),
    ),
    _tp(
        name="every rank holds the first ranks' sinks",
        model="gpt_oss",
        where=("*.self_attn.heads",),
        plant=_from_rank_0("self_attn.sinks"),
    ),
    _tp(
        name="bias of experts added by every rank",
        model="gpt_oss",
        where=("*.mlp.experts", "*.mlp"),
        plant=loads(_down_bias_on_every_rank),
    ),
    _tp(
        name="vocabulary of the second rank one off",
        model="mistral",
        where=("model.embed_tokens",),
        plant=loads(_vocabulary_one_off),
    ),
    _tp(
        name="heads of a rank in another order",
        model="mixtral",
        where=("*.self_attn.o_proj",),
        plant=loads(_half_of_each_head),
    ),
    _tp(
        name="one layer's MLP not summed",
        model="mistral",
        where=("model.layers.2.mlp", "model.layers.2.mlp.*"),
        plant=loads(_mlp_not_summed),
    ),
    _tp(
        name="every rank adds the first one's query bias",
        model="qwen2",
        where=("*.self_attn.q_proj",),
        plant=loads(_first_bias),
    ),
    _tp(
        name="keys and values of the other rank's heads",
        model="deepseek_v3",
        where=("*.self_attn.heads", "*.kv_b_proj"),
        plant=loads(_shares_of_the_latents_keys),
    ),
    _tp(
        name="logits of the ranks in the other order",
        model="qwen2",
        where=("lm_head", "logits"),
        plant=loads(_head_shards),
    ),
)
