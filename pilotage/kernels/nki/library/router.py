"""The router of a mixture of experts: the best experts of each token, and their weights."""

from __future__ import annotations

from typing import Any

from pilotage.kernels.nki.frontend import jit, nisa, nl
from pilotage.kernels.nki.library.parts import P, cast, load, spans

_MOST = 2.0e38  # logits are ranked within this of zero, infinite ones too
_NOT_A_NUMBER = 2.5e38  # ranks above every number, as in torch.topk
_TAKEN = -3.0e38  # below every rank
_NOBODY = 3.0e38  # above every rank
_AT_ONCE = 8  # that the vector engine finds


@jit
def router(logits: Any, top_k: int, rule: str, renormalize: bool) -> Any:
    """Weigh the experts of each token.

    Args:
        logits: [T, E], from `linear`.
        top_k, rule, renormalize: as in `functional.expert_affinities`; rule "softmax_topk" or "topk_softmax".

    Returns:
        [T, E] float32, zero where a token does not go.

    Numerics: softmax and sums in float32. Of equal logits the engine takes the first. A logit that is not a number
    makes the weights of its token's experts so, and no others: weights are chosen, not multiplied by 0.
    """
    tokens, experts = logits.shape
    out = nl.ndarray((tokens, experts), dtype=nl.float32, buffer=nl.shared_hbm)
    for start, rows in spans(tokens, P):
        scores = cast(load(logits[start : start + rows, :], (rows, experts)), nl.float32)
        chosen = _best(scores, top_k)
        top = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=top, op=nl.maximum, data=scores, axis=1, negate=True)
        weights = nl.ndarray((rows, experts), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=weights, op=nl.exp, data=scores, bias=top)
        if rule == "softmax_topk":
            _divide(weights, weights)
        if rule == "topk_softmax" or renormalize:
            _divide(weights, _kept(weights, chosen))
        nisa.dma_copy(dst=out[start : start + rows, :], src=_kept(weights, chosen))
    return out


def _best(scores: Any, top_k: int) -> Any:
    """Mark the `top_k` largest of each row with 1, the rest with 0, as bytes."""
    rows, experts = scores.shape
    left = _ranks(scores)
    for _, count in spans(top_k, _AT_ONCE):
        largest = nl.ndarray((rows, _AT_ONCE), dtype=nl.float32, buffer=nl.sbuf)
        nisa.max8(dst=largest, src=left)
        if count < _AT_ONCE:
            nisa.memset(dst=largest[:, count:_AT_ONCE], value=_NOBODY)
        nisa.nc_match_replace8(dst=left, data=left, vals=largest, imm=_TAKEN)
    out = nl.ndarray((rows, experts), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=out, data=left, op0=nl.equal, operand0=_TAKEN)
    return out


def _ranks(scores: Any) -> Any:
    """Give numbers in the order of the scores that the search for the largest can tell apart: no NaN, no infinity."""
    number = nl.ndarray(scores.shape, dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=number, data1=scores, data2=scores, op=nl.equal)
    within = nl.ndarray(scores.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=within, data=scores, op0=nl.maximum, operand0=-_MOST, op1=nl.minimum, operand1=_MOST)
    return _kept(within, number, _NOT_A_NUMBER)


def _kept(tile: Any, chosen: Any, otherwise: float = 0.0) -> Any:
    """Copy what is marked, in float32, into a tile that else holds `otherwise`."""
    out = nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=out, value=otherwise)
    nisa.tensor_copy_predicated(dst=out, src=tile, predicate=chosen)
    return out


def _divide(weights: Any, parts: Any) -> None:
    """Divide each row of weights by the sum of its `parts`."""
    total = nl.ndarray((weights.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=total, op=nl.add, data=parts, axis=1)
    nisa.reciprocal(dst=total, data=total)
    nisa.tensor_scalar(dst=weights, data=weights, op0=nl.multiply, operand0=total)
