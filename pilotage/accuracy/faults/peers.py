"""The rules by which others judge a port, side by side: pure functions from logits to accept or reject.

Each gets the target's logits in the serving dtype, Hugging Face's in fp32, and Hugging Face's in the serving dtype,
for the same tokens. `True` means that the rule accepts the target.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Rule = Callable[[Tensor, Tensor, Tensor], bool]

_TOP_K = ((5, 0.011), (50, 0.02), (1000, 0.03), (None, 0.05))
_BINS = 100


def top5(target: Tensor, expected: Tensor, baseline: Tensor) -> bool:
    """vLLM's check_logprobs_close, teacher-forced: each one's best token is among the other's best five."""
    best, other = target.topk(5, -1).indices, baseline.topk(5, -1).indices
    return bool((best == other[:, :1]).any(-1).all() and (other == best[:, :1]).any(-1).all())


def cosine(target: Tensor, expected: Tensor, baseline: Tensor) -> bool:
    """Cosine similarity of all logits at least 0.98."""
    a, b = target.double().flatten(), expected.double().flatten()
    return bool(a @ b / (a.norm() * b.norm()) >= 0.98)


def pcc(target: Tensor, expected: Tensor, baseline: Tensor) -> bool:
    """Pearson correlation of all logits at least 0.99."""
    a, b = (x.double().flatten() - x.double().mean() for x in (target, expected))
    return bool(a @ b / (a.norm() * b.norm()) >= 0.99)


def max_kl(target: Tensor, expected: Tensor, baseline: Tensor) -> bool:
    """Largest divergence of a token's distribution below 0.015."""
    log_p, log_q = (torch.log_softmax(x.double(), -1) for x in (expected, target))
    return bool((log_p.exp() * (log_p - log_q)).sum(-1).amax() < 0.015)


def nmse(target: Tensor, expected: Tensor, baseline: Tensor) -> bool:
    """Squared error over squared logits below 1e-2."""
    difference = target.double() - expected.double()
    return bool(difference.square().sum() / expected.double().square().sum() < 1e-2)


def static_top_k(target: Tensor, expected: Tensor, baseline: Tensor) -> bool:
    """Error over the largest logit within a fixed tolerance for the top 5, 50, 1000 and all tokens."""
    error = ((target - expected).abs() - 1e-5) / expected.abs().amax()
    for k, tolerance in _TOP_K:
        width = expected.shape[-1]
        chosen = expected.topk(min(k or width, width), -1).indices
        if not bool((error.gather(-1, chosen) <= tolerance).all()):
            return False
    return True


def bhattacharyya(target: Tensor, expected: Tensor, baseline: Tensor) -> bool:
    """Error histograms overlap by 0.99, or RMS errors are no larger than the baseline's; L-inf and L2 bounded too."""
    ours, theirs = (target - expected).double().abs(), (baseline - expected).double().abs()
    top = float(max(ours.amax(), theirs.amax())) or 1.0
    p, q = (torch.histc(x.flatten(), _BINS, 0.0, top) / x.numel() for x in (ours, theirs))
    sigma = float(ours.square().mean().sqrt() / theirs.square().mean().sqrt())
    close = float((p * q).sqrt().sum()) >= 0.99 or sigma <= 1
    return close and float(ours.amax() / theirs.amax()) < 5 and sigma < 3


def allclose(target: Tensor, expected: Tensor, baseline: Tensor) -> bool:
    """torch.allclose with rtol = atol = 1e-2."""
    return torch.allclose(target, expected, rtol=1e-2, atol=1e-2)


RULES: dict[str, Rule] = {
    "top-5 closeness": top5,
    "cosine 0.98": cosine,
    "PCC 0.99": pcc,
    "max KL 0.015": max_kl,
    "NMSE 1e-2": nmse,
    "static top-k map": static_top_k,
    "BC 0.99 or sigma 1": bhattacharyya,
    "allclose 1e-2": allclose,
}


def judge(target: Tensor, expected: Tensor, baseline: Tensor) -> dict[str, bool]:
    """Ask every rule.

    Args:
        target: [rows, V] of the target in the serving dtype.
        expected: [rows, V], Hugging Face in fp32.
        baseline: [rows, V], Hugging Face in the serving dtype.

    Returns:
        rule -> whether it accepts; what is not finite is rejected by all.
    """
    finite = bool(target.isfinite().all())
    return {name: finite and rule(target.float(), expected.float(), baseline.float()) for name, rule in RULES.items()}
