"""Two models on the same items: the mean difference of their scores, its interval, and how chance explains it.

Items are hard or easy for both models alike, so two independent standard errors overstate the noise of a difference
several times. Only what differs between the two on one item is noise here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pilotage.accuracy import metrics

FLIPS = 20_000


@dataclass(frozen=True, kw_only=True)
class Paired:
    """A paired comparison of item scores.

    Attributes:
        n: items.
        target: mean score. reference: the same.
        difference: target minus reference.
        interval: 95% interval of the difference.
        p_value: two-sided; how often chance alone makes a difference as large.
        better: items on which the target scores higher. worse: lower.
        test: name of the test.
    """

    n: int
    target: float
    reference: float
    difference: float
    interval: tuple[float, float]
    p_value: float
    better: int
    worse: int
    test: str


def compare(target: Sequence[float], reference: Sequence[float], *, seed: int = 0) -> Paired:
    """Compare item scores; NaN items must have been left out.

    Scores that are all 0 or 1 get McNemar's exact test and an adjusted Wald interval (one discordant item added each
    way, so that no discordance at all still has a width). Others get a sign-flip test and Student's t.

    Raises:
        ValueError: not one score an item.
    """
    if len(target) != len(reference):
        raise ValueError(f"{len(target)} scores against {len(reference)}")
    n = len(target)
    differences = [a - b for a, b in zip(target, reference, strict=True)]
    better, worse = sum(x > 0 for x in differences), sum(x < 0 for x in differences)
    mean = math.fsum(differences) / n if n else math.nan
    if all(x in (0, 1) for x in (*target, *reference)):
        test, p_value = "exact McNemar", binomial_two_sided(better, better + worse)
        interval = _adjusted_wald(better, worse, n)
    else:
        test, p_value = "sign flips", _sign_flips(differences, seed)
        interval = _student(differences)
    return Paired(
        n=n,
        target=math.fsum(target) / n if n else math.nan,
        reference=math.fsum(reference) / n if n else math.nan,
        difference=mean,
        interval=interval,
        p_value=p_value,
        better=better,
        worse=worse,
        test=test,
    )


def binomial_two_sided(successes: int, n: int) -> float:
    """Return the two-sided probability of a count as far from n / 2 as this one, both outcomes being equally likely."""
    tail = min(successes, n - successes)
    return min(1.0, 2 * math.fsum(math.comb(n, k) for k in range(tail + 1)) / 2**n)


def _adjusted_wald(better: int, worse: int, n: int) -> tuple[float, float]:
    gain, loss = (better + 1) / (n + 2), (worse + 1) / (n + 2)
    difference = gain - loss
    half = 1.959964 * math.sqrt(max(gain + loss - difference**2, 0.0) / (n + 2))
    return max(-1.0, difference - half), min(1.0, difference + half)


def _student(differences: Sequence[float]) -> tuple[float, float]:
    n = len(differences)
    if n < 2:
        return -math.inf, math.inf
    mean = math.fsum(differences) / n
    variance = math.fsum((x - mean) ** 2 for x in differences) / (n - 1)
    half = metrics.student_t_quantile(0.975, n - 1) * math.sqrt(variance / n)
    return mean - half, mean + half


def _sign_flips(differences: Sequence[float], seed: int) -> float:
    """How often random signs give a mean as large; with few items that differ, all signs are tried."""
    values = torch.tensor([x for x in differences if x != 0], dtype=torch.float64)
    if not values.numel():
        return 1.0
    observed = abs(float(values.sum())) * (1 - 1e-12)
    if values.numel() <= 14:
        count = 2 ** values.numel()
        bits = (torch.arange(count)[:, None] >> torch.arange(values.numel())) & 1
        sums = ((bits * 2 - 1) * values).sum(1).abs()
        return float((sums >= observed).double().mean())
    generator = torch.Generator().manual_seed(seed)
    hits = done = 0
    while done < FLIPS:
        size = min(2000, FLIPS - done)
        signs = torch.randint(0, 2, (size, values.numel()), generator=generator) * 2 - 1
        hits += int(((signs * values).sum(1).abs() >= observed).sum())
        done += size
    return (hits + 1) / (FLIPS + 1)


def wilson(score: float, n: int) -> tuple[float, float] | None:
    """Return the 95% Wilson interval of a share of n items."""
    if not n or math.isnan(score) or not 0 <= score <= 1:
        return None
    z = 1.959964
    middle = (score + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * math.sqrt(score * (1 - score) / n + z**2 / (4 * n * n)) / (1 + z**2 / n)
    return max(0.0, middle - half), min(1.0, middle + half)
