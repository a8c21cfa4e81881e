"""Embedding, linear projections, the gated MLP and the head.

These compute one rank's share; collectives belong to the modules of `pilotage.nn`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pilotage.core.errors import Unsupported
from pilotage.functional.registry import operator

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """Look an activation up by its Hugging Face name.

    Raises:
        Unsupported: a name that is not served.
    """
    if name not in ACTIVATIONS:
        raise Unsupported(
            f"activation {name!r} is not implemented", where="hidden_act", do=f"served are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


@operator
def embedding(
    input_ids: Tensor,
    weight: Tensor,
    *,
    scale: float | None = None,
    padding_idx: int | None = None,
    sparse_gradient: bool = False,
) -> Tensor:
    """Look token rows up, scaled if the model says so.

    Args:
        input_ids: [...] integers in [0, V).
        weight: [V, D].
        scale: factor on the rows, e.g. Gemma's sqrt(D).
        padding_idx: a row that gets no gradient from here; None for none.
        sparse_gradient: give the weight the rows of its gradient alone, as a sparse tensor.

    Returns:
        [..., D] in the weight's dtype.

    Numerics: the scale is rounded to the weight's dtype first, as in transformers (bf16 sqrt(640) is 25.25).
    """
    rows = F.embedding(input_ids, weight, padding_idx, sparse=sparse_gradient)
    if scale is None:
        return rows
    return rows * torch.tensor(scale, dtype=weight.dtype, device=weight.device)


@operator
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Project: x [..., in], weight [out, in], bias [out] -> [..., out].

    Numerics: torch's linear in the tensors' dtype, with its fp32 accumulation.
    """
    return F.linear(x, weight, bias)


@operator
def qkv_proj(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Project to queries, keys and values (or any group that shares its input) in one product.

    Args:
        x: [..., D].
        weight: [sum(sizes), D], the members one after another.
        bias: [sum(sizes)] or None.
        sizes: output width of each member, e.g. (N*H, K*H, K*H).

    Returns:
        One [..., size] per member; views of one tensor.

    Numerics: as `linear`; each output is the product with its own weight, up to how a wider product is rounded.
    """
    return F.linear(x, weight, bias).split(sizes, dim=-1)


@operator
def o_proj(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Project attention's output back to the model's width: x [..., N*H], weight [D, N*H] -> [..., D].

    With tensor parallelism this is a rank's partial sum; the caller reduces it and adds the bias after.

    Numerics: as `linear`.
    """
    return F.linear(x, weight, bias)


@operator
def gated_activation(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
    """Multiply `activation(gate)` by `up`, both [..., F].

    Numerics: in the tensors' own dtype, the activation rounded before the product.
    """
    return activation_function(activation)(gate) * up


@operator
def mlp(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str,
) -> Tensor:
    """Run the gated MLP: down(activation(gate(x)) * up(x)).

    Args:
        x: [..., D].
        gate_up_weight: [2F, D], gate's rows first.
        down_weight: [D, F].
        gate_up_bias: [2F] or None.
        down_bias: [D] or None; with tensor parallelism the caller adds it after its reduction.
        activation: Hugging Face name, see `ACTIVATIONS`.

    Returns:
        [..., D]; with tensor parallelism the rank's partial sum.

    Raises:
        Unsupported: an unknown activation.

    Numerics: each product as `linear`; the activation in the tensors' dtype.
    """
    gate, up = F.linear(x, gate_up_weight, gate_up_bias).chunk(2, dim=-1)
    return F.linear(activation_function(activation)(gate) * up, down_weight, down_bias)


@operator
def lm_head(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Project hidden rows to logits over (a rank's share of) the vocabulary.

    Args:
        x: [rows, D], after the final norm.
        weight: [V, D].
        bias: [V] or None.

    Returns:
        [rows, V] in x's dtype.

    Numerics: as `linear`.
    """
    return F.linear(x, weight, bias)


@operator
def softcap(x: Tensor, *, cap: float) -> Tensor:
    """Bound smoothly: cap * tanh(x / cap), any shape.

    Numerics: in x's dtype, as transformers caps final logits.
    """
    return torch.tanh(x / cap) * cap
