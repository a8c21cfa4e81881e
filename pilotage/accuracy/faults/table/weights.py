"""The head and the vocabulary, and what loading does to weights."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pilotage.accuracy.faults.fault import Fault, loads, method, reads

HEAD = ("lm_head", "logits")
_head = partial(Fault, heading="lm_head / vocab", where=HEAD)
_load = partial(Fault, heading="Loading, adapters, config", only="loading")


def _causal_lm() -> Any:
    from pilotage.models.common.causal_lm import CausalLM

    return CausalLM


def _random(shape: Any, std: float) -> Tensor:
    return std * torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _untied(model: Any) -> None:
    weight = model.lm_head.weight
    model.lm_head.weight = nn.Parameter(_random(weight.shape, 0.05).to(weight.dtype))


def _tied(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach().clone())


def _shifted(model: Any) -> None:
    model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))


def _cut(model: Any) -> None:
    model.lm_head.weight[-16:] = 0


def _row_before(real: Any, *args: Any, **how: Any) -> Any:
    call = inspect.signature(real).bind(*args, **how)  # the engine names its arguments
    call.arguments["sampling_positions"] = (call.arguments["sampling_positions"] - 1).clamp(min=0)
    return real(*call.args, **call.kwargs)


def _no_final_norm(model: Any) -> None:
    model.model.norm.forward = lambda x: x


def _lost_mlp(model: Any) -> None:
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.copy_(_random(weight.shape, 0.1))


def _exchanged_layers(model: Any) -> None:
    first, second = (dict(model.model.layers[i].named_parameters()) for i in (1, 2))
    for name, parameter in first.items():
        a, b = parameter.clone(), second[name].clone()
        parameter.copy_(b)
        second[name].copy_(a)


def _through_fp8(model: Any) -> None:
    for layer in model.model.layers:
        weight = layer.self_attn.o_proj.weight
        weight.copy_(weight.to(torch.float8_e4m3fn).to(weight.dtype))


def _stale_embedding(model: Any) -> None:
    """A special token's row from before the vocabulary was extended."""
    model.model.embed_tokens.weight[2] = 0


def _transposed_square(model: Any) -> None:
    """One square part of a weight stored the other way round."""
    for layer in model.model.layers:
        size = layer.self_attn.head_size
        for weight in (layer.self_attn.v_proj.weight,):
            weight[:size, :size] = weight[:size, :size].t().clone()


def _lost_row(model: Any) -> None:
    """The row of one token in the head."""
    model.lm_head.weight[17] = 0


def _unseen_rows(model: Any) -> None:
    """Rows of tokens that no prompt of ours has: none of them is computed with."""
    model.model.embed_tokens.weight[2:5] = 0.5


def _fresh_norm(model: Any) -> None:
    model.model.layers[3].input_layernorm.weight.fill_(1.0)


def _last_norm_epsilon(model: Any) -> None:
    model.model.norm.eps = 1e-5


def _block_turned(model: Any) -> None:
    weight = model.model.layers[2].mlp.down_proj.weight
    weight[:32, :32] = weight[:32, :32].t().clone()


def _one_element(model: Any) -> None:
    """A single wrong value, as a flipped bit or a broken block of a file leaves it."""
    weight = model.model.layers[1].self_attn.v_proj.weight
    weight[3, 5] = -weight[3, 5] + 1.0


def _one_layer_twice(model: Any) -> None:
    """The last layer has the weights of the one before it."""
    before, last = (dict(layer.named_parameters()) for layer in list(model.model.layers)[-2:])
    for name, parameter in last.items():
        parameter.copy_(before[name])


FAULTS = (
    _head(name="tied head not loaded", model="gemma3", only="loading", plant=loads(_untied)),
    _head(name="tied head not loaded, qwen2", model="qwen2", only="loading", plant=loads(_untied)),
    _head(name="head tied where it should not be", model="qwen3", only="loading", plant=loads(_tied)),
    _head(name="head's rows one token off", model="llama3", only="loading", plant=loads(_shifted)),
    _head(name="head padded with zeros too early", model="mistral", only="loading", plant=loads(_cut)),
    _head(
        name="logits of the row before",
        model="llama3",
        where=(*HEAD, "model.norm"),
        plant=method(_causal_lm, "forward", _row_before),
    ),
    _head(name="final norm left out", model="mixtral", where=("model.norm",), plant=loads(_no_final_norm)),
    _load(
        name="one projection not loaded",
        model="llama3",
        where=("model.layers.1.mlp", "model.layers.1.mlp.down_proj"),
        plant=loads(_lost_mlp),
    ),
    _load(
        name="two layers exchanged",
        model="mistral",
        where=("model.layers.[12]", "model.layers.[12].*"),
        plant=loads(_exchanged_layers),
    ),
    _load(
        name="output projections rounded to fp8",
        model="qwen2",
        where=("*.self_attn.o_proj",),
        plant=loads(_through_fp8),
    ),
    _load(
        name="row of BOS in the embedding lost",
        model="gpt_oss",
        where=("model.embed_tokens",),
        plant=loads(_stale_embedding),
    ),
    _load(
        name="part of the value projection transposed",
        model="qwen3_moe",
        where=("*.self_attn.v_proj",),
        plant=loads(_transposed_square),
    ),
    _head(name="row of one token lost", model="qwen2", only="loading", plant=loads(_lost_row)),
    _head(name="epsilon of the last norm alone", model="qwen3", where=("model.norm",), plant=loads(_last_norm_epsilon)),
    _load(
        name="norm of one layer at its first value",
        model="qwen3",
        where=("model.layers.3.input_layernorm",),
        plant=loads(_fresh_norm),
    ),
    _load(
        name="part of one down projection turned",
        model="mistral",
        where=("model.layers.2.mlp", "model.layers.2.mlp.down_proj"),
        plant=loads(_block_turned),
    ),
    _load(name="a single value", model="llama3", where=("model.layers.1.self_attn.v_proj",), plant=loads(_one_element)),
    _load(
        name="one layer's weights in two layers",
        model="gemma2",
        where=("model.layers.4", "model.layers.4.*"),
        plant=loads(_one_layer_twice),
    ),
    _load(
        name="rows of the embedding that no prompt uses",
        model="llama3",
        where=("model.embed_tokens",),
        plant=loads(_unseen_rows),
    ),
    _load(
        name="a default over the stated epsilon", model="qwen3", only="", where=("*norm",), plant=reads(norm_eps=1e-5)
    ),
)
