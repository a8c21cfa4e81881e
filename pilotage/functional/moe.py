"""Mixture of experts: which experts a token goes to, and what they make of it.

Routing is a dense row of affinities over all experts, zero where a token does not go: its shape depends on no value, so
a graph over it is whole. The definition of `experts` computes every expert for every token; an implementation that
reads only the chosen ones is offered where few tokens meet many experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pilotage.core.errors import Unsupported
from pilotage.functional.domain import Domain, Limit
from pilotage.functional.projections import activation_function
from pilotage.functional.registry import operator, register

RULES = ("softmax_topk", "topk_softmax", "sigmoid_groups")
CLAMPED_SWIGLU = "clamped_swiglu"


@operator
def router_logits(hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Score the experts: hidden_states [..., D], weight [E, D], bias [E] -> [..., E].

    Numerics: as `linear`.
    """
    return F.linear(hidden_states, weight, bias)


@operator
def expert_affinities(
    logits: Tensor,
    correction: Tensor | None = None,
    *,
    top_k: int,
    rule: str,
    renormalize: bool = False,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
) -> Tensor:
    """Turn router logits into the weight of each expert.

    Args:
        logits: [..., E].
        correction: [E] added to the scores of "sigmoid_groups" for the choice, not to the weights; or None.
        top_k: experts of a token.
        rule: "softmax_topk" (probabilities over all experts, of which the largest are kept: Mixtral, Qwen),
            "topk_softmax" (the largest logits, and probabilities among these alone: gpt-oss) or "sigmoid_groups"
            (each expert's own sigmoid; of groups of neighbouring experts those whose two best sum highest, and of
            their experts the best: DeepSeek-V3).
        renormalize: divide the kept probabilities by their sum; "topk_softmax" sums to one already.
        num_groups, top_groups: groups of experts, and how many of them a token chooses from; of "sigmoid_groups".
        scale: factor on the weights.

    Returns:
        [..., E] fp32, zero where a token does not go.

    Raises:
        Unsupported: an unknown rule.

    Numerics: softmax and sum in fp32, whatever the logits' dtype.
    """
    if rule not in RULES:
        raise Unsupported(f"routing rule {rule!r} is not implemented", where="router", do=" or ".join(RULES))
    scores = logits.float()
    if rule == "sigmoid_groups":
        scores = scores.sigmoid()
        chosen = _best_of_groups(scores if correction is None else scores + correction, top_k, num_groups, top_groups)
        kept = scores.gather(-1, chosen)
        if renormalize:
            kept = kept / (kept.sum(-1, keepdim=True) + 1e-20)
    elif rule == "softmax_topk":
        kept, chosen = torch.topk(torch.softmax(scores, dim=-1), top_k, dim=-1)
        if renormalize:
            kept = kept / kept.sum(-1, keepdim=True)
    else:
        kept, chosen = torch.topk(scores, top_k, dim=-1)
        kept = torch.softmax(kept, dim=-1)
    return torch.zeros_like(scores).scatter(-1, chosen, kept if scale == 1.0 else kept * scale)


def _best_of_groups(scores: Tensor, top_k: int, num_groups: int, top_groups: int) -> Tensor:
    """Return the experts [..., top_k] with the highest of `scores` [..., E] within the best groups."""
    grouped = scores.unflatten(-1, (num_groups, -1))
    best = grouped.topk(2, dim=-1).values.sum(-1).topk(top_groups, dim=-1).indices
    open_to = torch.zeros_like(grouped[..., 0]).scatter(-1, best, 1.0) > 0
    return torch.where(open_to[..., None], grouped, float("-inf")).flatten(-2).topk(top_k, dim=-1).indices


def router(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    top_k: int,
    rule: str,
    renormalize: bool = False,
    router_logits_override: Tensor | None = None,
) -> Tensor:
    """Route tokens: the logits and their affinities in one call.

    Args:
        hidden_states: [..., D].
        weight: [E, D].
        bias: [E] or None.
        top_k, rule, renormalize: see `expert_affinities`.
        router_logits_override: [..., E] taken instead of the logits of `hidden_states`.

    Returns:
        [..., E] fp32.
    """
    logits = router_logits(hidden_states, weight, bias) if router_logits_override is None else router_logits_override
    return expert_affinities(logits, top_k=top_k, rule=rule, renormalize=renormalize)


@operator
def experts(
    x: Tensor,
    affinities: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    top_k: int,
    activation: str,
    interleaved: bool = False,
    alpha: float | None = None,
    limit: float | None = None,
) -> Tensor:
    """Run gated MLPs as experts and add up what each token's experts give, weighted.

    Args:
        x: [..., D].
        affinities: [..., E] from `expert_affinities`; at most `top_k` of a row are not zero.
        gate_up_weight: [E, 2F, D], gate's rows first, or alternating with up's where `interleaved`.
        down_weight: [E, D, F].
        gate_up_bias: [E, 2F] or None, in the order of the rows.
        down_bias: [E, D] or None.
        top_k: experts of a token.
        activation: Hugging Face name, or "clamped_swiglu".
        interleaved: gate and up alternate.
        alpha, limit: of "clamped_swiglu": gate * sigmoid(alpha * gate) * (up + 1), gate at most `limit` and up within
            `limit` of zero (gpt-oss).

    Returns:
        [..., D] in x's dtype; with tensor parallelism over F the rank's partial sum.

    Raises:
        Unsupported: an unknown activation.

    Numerics: products in the tensors' dtype; the weighted sum over experts in fp32, rounded once.
    """
    rows, weights = x.flatten(0, -2), affinities.flatten(0, -2)
    hidden = torch.matmul(rows, gate_up_weight.transpose(1, 2))
    if gate_up_bias is not None:
        hidden = hidden + gate_up_bias[:, None]
    hidden = _gated(hidden, activation, interleaved, alpha, limit)
    out = torch.matmul(hidden, down_weight.transpose(1, 2))
    if down_bias is not None:
        out = out + down_bias[:, None]
    weights_ET = weights.t()[..., None]
    # Where a token does not go nothing of the expert may leak in, not even 0 times an overflow.
    total = torch.where(weights_ET != 0, out.float() * weights_ET, 0.0).sum(0)
    return total.to(x.dtype).view(x.shape)


def _chosen_experts(
    x: Tensor,
    affinities: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    top_k: int,
    activation: str,
    interleaved: bool = False,
    alpha: float | None = None,
    limit: float | None = None,
) -> Tensor:
    rows = x.flatten(0, -2)
    weights_TK, chosen_TK = torch.topk(affinities.flatten(0, -2), top_k, dim=-1)
    hidden = torch.matmul(gate_up_weight[chosen_TK], rows[:, None, :, None])[..., 0]
    if gate_up_bias is not None:
        hidden = hidden + gate_up_bias[chosen_TK]
    hidden = _gated(hidden, activation, interleaved, alpha, limit)
    out = torch.matmul(down_weight[chosen_TK], hidden[..., None])[..., 0]
    if down_bias is not None:
        out = out + down_bias[chosen_TK]
    weights_TK1 = weights_TK[..., None]
    total = torch.where(weights_TK1 != 0, out.float() * weights_TK1, 0.0).sum(1)
    return total.to(x.dtype).view(x.shape)


def _gated(hidden: Tensor, activation: str, interleaved: bool, alpha: float | None, limit: float | None) -> Tensor:
    gate, up = (hidden[..., ::2], hidden[..., 1::2]) if interleaved else hidden.chunk(2, dim=-1)
    if activation != CLAMPED_SWIGLU:
        return activation_function(activation)(gate) * up
    if alpha is None or limit is None:
        raise Unsupported(f"{CLAMPED_SWIGLU} needs alpha and limit", where="experts")
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


_FEW_TOKENS = Domain(
    worth={"2 * T * top_k - E": Limit(at_most=0, why="with more tokens, reading all experts is cheaper")},
    gradient=True,
    sharding="that of its torch operators",
)
register("experts", "chosen", _chosen_experts, domain=_FEW_TOKENS, priority=10)
