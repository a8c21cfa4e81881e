"""Sampling of the next token, as it runs inside a graph."""

from __future__ import annotations

import torch
from torch import Tensor

from pilotage.functional.registry import operator


@operator
def greedy_tokens(logits: Tensor) -> Tensor:
    """Take the most likely token of each row, the first of those that tie.

    Args:
        logits: [R, V], any float dtype.

    Returns:
        [R] int64.

    Numerics: exact; NaN counts as the largest.
    """
    return logits.argmax(-1)


@operator
def sample_tokens(
    logits: Tensor, sampling_params: Tensor, noise: Tensor, *, top_k: bool = True, top_p: bool = True
) -> Tensor:
    """Draw one token of each row.

    Only `noise` is random, so a row's token depends on its logits, its parameters and its own number, never on the
    batch, and a caller with a generator for each request has reproducible requests.

    Args:
        logits: [R, V], any float dtype.
        sampling_params: [R, 3] fp32: top_k (0 or V for all tokens), top_p (1 for all), temperature (0 for the most
            likely token). Row by row: temperature first, then the `top_k` most likely tokens with everything that ties
            with the last of them, then of those the fewest whose probabilities reach `top_p`.
        noise: [R] fp64 in [0, 1), uniform.
        top_k, top_p: whether any row may use this parameter; without both, nothing is sorted.

    Returns:
        [R] int64.

    Numerics: probabilities in fp32, their running sum in fp64; the token is where that sum passes noise times its end
    (inverse transform). The definition of vLLM's sampler (v1/sample/ops/topk_topp_sampler.py), which draws by other
    random numbers: equal in distribution, not token by token.
    """
    wanted_k, wanted_p, temperature = sampling_params.unbind(-1)
    values = logits.float()
    best = values.argmax(-1)
    # A greedy row is drawn as well, at temperature 1, and not used.
    values = values / torch.where(temperature > 0, temperature, 1.0)[:, None]
    order = None
    if top_k or top_p:
        values, order = values.sort(dim=-1, descending=True)
    if top_k:
        size = values.shape[-1]
        count = torch.where(wanted_k > 0, wanted_k, size).clamp(max=size).long()
        values = values.masked_fill(values < values.gather(1, count[:, None] - 1), float("-inf"))
    probabilities = values.softmax(-1)
    if top_p:
        # A token stays where those before it have not reached the bound; the first one always does.
        before = probabilities.double().cumsum(-1) - probabilities
        probabilities = torch.where(before < wanted_p[:, None], probabilities, 0.0)
    reached = probabilities.double().cumsum(-1)
    total = reached[:, -1:]
    # The first token past the drawn point; should rounding put that at the very end, the last one with any probability.
    drawn = torch.minimum((reached <= noise[:, None] * total).sum(-1), (reached < total).sum(-1))
    if order is not None:
        drawn = order.gather(1, drawn[:, None])[:, 0]
    return torch.where(temperature > 0, drawn, best)
