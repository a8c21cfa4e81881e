"""How often the three-way assertion is wrong, measured on errors of known law.

`python -m pilotage.accuracy.simulate` prints the table that docs/accuracy.md shows: for tensors of several sizes, error
laws and true error ratios, how many of a number of independent trials pass, fail or are not measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from pilotage.accuracy import gates
from pilotage.core.nouns import worst

# Size of the errors relative to an expected tensor of unit variance; above the 2^-8 of bfloat16.
NOISE = 0.02


def _gaussian(expected: Tensor, generator: torch.Generator) -> Callable[[], Tensor]:
    return lambda: torch.randn(expected.shape, generator=generator)


def _uniform(expected: Tensor, generator: torch.Generator) -> Callable[[], Tensor]:
    return lambda: torch.rand(expected.shape, generator=generator) - 0.5


def _rounding(expected: Tensor, generator: torch.Generator) -> Callable[[], Tensor]:
    """Rounding of a sum of ten terms to 8 bits, each arm in terms of its own: proportional to the magnitude."""

    def draw() -> Tensor:
        terms = torch.randn((10, *expected.shape), generator=generator)
        terms[0] += expected - terms.sum(0)
        return (terms.bfloat16().float().sum(0) - terms.sum(0)) / 0.006

    return draw


def _laplace(expected: Tensor, generator: torch.Generator) -> Callable[[], Tensor]:
    def draw() -> Tensor:
        sign = torch.rand(expected.shape, generator=generator).sub(0.5).sign()
        return sign * torch.empty(expected.shape).exponential_(generator=generator)

    return draw


def _spread(expected: Tensor, generator: torch.Generator) -> Callable[[], Tensor]:
    """Gaussian errors whose size varies e-fold between elements, the same in both arms."""
    size = torch.randn(expected.shape, generator=generator).exp()
    return lambda: size * torch.randn(expected.shape, generator=generator)


LAWS: dict[str, Callable[[Tensor, torch.Generator], Callable[[], Tensor]]] = {
    "gaussian": _gaussian,
    "uniform": _uniform,
    "rounding": _rounding,
    "laplace": _laplace,
    "spread": _spread,
}


def outcomes(law: str, n: int, ratio: float, seeds: Iterable[int]) -> Counter[str]:
    """Count the outcomes of three-way comparisons of tensors whose target errs `ratio` times as much.

    Args:
        law: of the errors, a key of `LAWS`.
        n: elements of each tensor.
        ratio: standard deviation of the target's errors over the baseline's; 1 is a perfect target.
        seeds: one trial each.
    """
    counts: Counter[str] = Counter()
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        expected = torch.randn(n, generator=generator)
        draw = LAWS[law](expected, generator)
        target, baseline = expected + NOISE * ratio * draw(), expected + NOISE * draw()
        verdicts = gates.three_way(target, expected, baseline, rtol=0.0, name="simulated")
        counts[worst([verdict.status for verdict in verdicts]).value] += 1
    return counts


def table(sizes: Iterable[int], ratios: Iterable[float], trials: int) -> list[str]:
    """Return the measurement as rows of a Markdown table."""
    rows = ["| elements | errors | true ratio | pass | fail | not measured |", "|---|---|---|---|---|---|"]
    for n in sizes:
        for law in LAWS:
            for ratio in ratios:
                found = outcomes(law, n, ratio, range(trials))
                share = [f"{100 * found[status] / trials:.1f}%" for status in ("pass", "fail", "not_measured")]
                rows.append(f"| {n} | {law} | {ratio:g} | {' | '.join(share)} |")
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("\n".join(table((64, 1024, 100_000), (1.0, 1.3, 2.0), 200)))
