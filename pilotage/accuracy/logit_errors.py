"""Errors of logits as distributions: divergence, top tokens, the top-k error map. Pure, like `metrics`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pilotage.accuracy import metrics

TOP_K = (5, 50, 1000)
# Mantissa bits that are stored, by dtype; one ulp at magnitude m is 2 ** (floor(log2 m) - bits).
_MANTISSA_BITS = {
    torch.float64: 52,
    torch.float32: 23,
    torch.float16: 10,
    torch.bfloat16: 7,
}


def ulp(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the spacing of `dtype` at `magnitude` (float64, same shape); 0 has the spacing of the smallest normal."""
    smallest = torch.finfo(dtype).tiny
    exponent = torch.floor(torch.log2(magnitude.double().abs().clamp_min(smallest)))
    return torch.exp2(exponent - _MANTISSA_BITS[dtype])


@dataclass(frozen=True, kw_only=True)
class LogitErrors:
    """What only logits have; every tensor is [n] float64 unless it says otherwise.

    Attributes:
        kl: KL(expected || actual) of the softmax distributions, in nats.
        top1: bool; the two rows have their maximum at the same token.
        actual_top: int64; the token at the maximum of the actual row.
        expected_top: int64; the same of the expected row.
        ulps: (actual[its own top] - actual[the expected top]) in ulps of the dtype at max|actual|; 0 where they agree.
        topk: for each k and "all": max|error| over the k largest expected logits, over max|expected|.
        gap: expected distance between its two largest logits: small where a flip of the top token means nothing.
    """

    kl: Tensor
    top1: Tensor
    actual_top: Tensor
    expected_top: Tensor
    ulps: Tensor
    topk: dict[str, Tensor]
    gap: Tensor


def logit_errors(actual: Tensor, expected: Tensor, *, dtype: torch.dtype, ks: Sequence[int] = TOP_K) -> LogitErrors:
    """Compare rows of logits as distributions.

    Args:
        actual: [n, V] logits of the arm, any float dtype, n at least 1.
        expected: [n, V] logits of the reference.
        dtype: the dtype in whose ulps divergence is told.
        ks: sizes of the top-k error map; "all" is always added.
    """
    if actual.shape != expected.shape or not expected.shape[0]:
        raise ValueError(f"logits of shape {tuple(actual.shape)} against {tuple(expected.shape)}")
    parts: list[tuple[Tensor, ...]] = []
    width = expected.shape[-1]
    rows_at_once = max(1, metrics.AT_ONCE // width)
    sizes = {str(k): min(k, width) for k in ks}
    for start in range(0, expected.shape[0], rows_at_once):
        a = actual[start : start + rows_at_once].detach().double()
        e = expected[start : start + rows_at_once].detach().double()
        magnitude = metrics.errors(a, e).abs()
        log_p, log_q = e.log_softmax(-1), a.log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        top_values, top = e.topk(max(2, *sizes.values()) if width > 1 else 1, dim=-1)
        expected_top, actual_top = top[:, 0], a.argmax(-1)
        ahead = a.amax(-1) - a.gather(-1, expected_top[:, None])[:, 0]
        ulps = ahead / ulp(a.abs().amax(-1), dtype)
        by_rank = magnitude.gather(-1, top).cummax(-1).values
        largest = e.abs().amax(-1)
        parts.append(
            (
                torch.where(torch.isfinite(kl), kl.clamp_min(0), torch.full_like(kl, math.inf)),
                actual_top == expected_top,
                actual_top,
                expected_top,
                torch.where(torch.isfinite(ulps), ulps, torch.full_like(ulps, math.inf)),
                top_values[:, 0] - top_values[:, 1] if width > 1 else torch.full_like(kl, math.inf),
                *(by_rank[:, size - 1] / largest for size in sizes.values()),
                magnitude.amax(-1) / largest,
            )
        )
    kl, top1, actual_top, expected_top, ulps, gap, *by_k = (torch.cat(column) for column in zip(*parts, strict=True))
    return LogitErrors(
        kl=kl,
        top1=top1,
        actual_top=actual_top,
        expected_top=expected_top,
        ulps=ulps,
        topk=dict(zip([*sizes, "all"], by_k, strict=True)),
        gap=gap,
    )
