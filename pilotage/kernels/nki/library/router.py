"""The router of a mixture of experts: the best experts of each token, and their weights."""

from __future__ import annotations

from typing import Any

from pilotage.kernels.nki.frontend import jit, nisa, nl
from pilotage.kernels.nki.library.parts import P, cast, load, spans

_TAKEN = -3.0e38  # below every logit
_NOBODY = 3.0e38  # above every logit
_AT_ONCE = 8  # that the vector engine finds


@jit
def router(logits: Any, top_k: int, rule: str, renormalize: bool) -> Any:
    """Weigh the experts of each token.

    Args:
        logits: [T, E], from `linear`.
        top_k, rule, renormalize: as in `functional.expert_affinities`; rule "softmax_topk" or "topk_softmax".

    Returns:
        [T, E] float32, zero where a token does not go.

    Numerics: softmax and sums in float32. Of equal logits the engine takes the first.
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
            _normalise(weights)
        nisa.tensor_tensor(dst=weights, data1=weights, data2=chosen, op=nl.multiply)
        if rule == "topk_softmax" or renormalize:
            _normalise(weights)
        nisa.dma_copy(dst=out[start : start + rows, :], src=weights)
    return out


def _best(scores: Any, top_k: int) -> Any:
    """Mark the `top_k` largest of each row with 1, the rest with 0."""
    rows, experts = scores.shape
    left = cast(scores, nl.float32)
    for _, count in spans(top_k, _AT_ONCE):
        largest = nl.ndarray((rows, _AT_ONCE), dtype=nl.float32, buffer=nl.sbuf)
        nisa.max8(dst=largest, src=left)
        if count < _AT_ONCE:
            nisa.memset(dst=largest[:, count:_AT_ONCE], value=_NOBODY)
        nisa.nc_match_replace8(dst=left, data=left, vals=largest, imm=_TAKEN)
    out = nl.ndarray((rows, experts), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=out, data=left, op0=nl.equal, operand0=_TAKEN)
    return out


def _normalise(weights: Any) -> None:
    total = nl.ndarray((weights.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=total, op=nl.add, data=weights, axis=1)
    nisa.reciprocal(dst=total, data=total)
    nisa.tensor_scalar(dst=weights, data=weights, op0=nl.multiply, operand0=total)
