"""Do greedy tokens agree with Hugging Face's? Told from a tie by how far apart the two logits are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from pilotage.core.nouns import Status, Verdict

FLOAT32_TIE = 1e-4  # logits closer than this in fp32 may come out in either order
# Two logits with independent errors of RMS s differ by s * sqrt(2); 6 s is 4.2 of those, one row in 40,000.
NOISE_TIE = 6.0


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How one continuation compares.

    Attributes:
        agrees: True: every token is the reference's first choice after the same tokens. "tie": where it is not, the
            reference's logits are too close to tell. False: somewhere they are not close.
        differing: for each other token {"position", "token", "reference", "gap", "tie_below"}, positions absolute.
        compared: tokens compared.
    """

    agrees: bool | Literal["tie"]
    differing: list[dict[str, Any]]
    compared: int


def agreement(tokens: Sequence[int], prompt: int, expected: Tensor, baseline: Tensor | None) -> Agreement:
    """Compare a continuation with what Hugging Face would have said after the same tokens, step by step.

    Following the engine's own tokens keeps every step comparable: after a first difference two free continuations are
    about different texts.

    Args:
        tokens: prompt and continuation.
        prompt: number of prompt tokens.
        expected: [len(tokens) - prompt, V] fp32 logits of Hugging Face in fp32, of the rows that predict the
            continuation.
        baseline: the same rows of Hugging Face in the serving dtype, whose error sets what counts as a tie; None when
            the serving dtype is fp32, for a tie below `FLOAT32_TIE`.

    Raises:
        ValueError: the number of rows does not fit.
    """
    said = tokens[prompt:]
    if len(said) != expected.shape[0] or (baseline is not None and baseline.shape != expected.shape):
        raise ValueError(f"{len(said)} tokens, logits {list(expected.shape)}")
    differing = []
    for step, token in enumerate(said):
        row = expected[step].float()
        first = int(row.argmax())
        if first == token:
            continue
        gap = float(row[first] - row[token])
        bound = FLOAT32_TIE
        if baseline is not None:
            bound = max(NOISE_TIE * float((baseline[step].float() - row).square().mean().sqrt()), FLOAT32_TIE)
        differing.append(
            {"position": prompt + step, "token": token, "reference": first, "gap": gap, "tie_below": bound}
        )
    far = any(not entry["gap"] <= entry["tie_below"] for entry in differing)  # a gap of NaN is far
    return Agreement(agrees=False if far else "tie" if differing else True, differing=differing, compared=len(said))


def verdict(found: Sequence[Agreement], *, dtype: str) -> Verdict:
    """Judge all continuations: no token may differ by more than a tie."""
    wrong = [entry for one in found for entry in one.differing if not entry["gap"] <= entry["tie_below"]]
    ties = sum(len(one.differing) for one in found) - len(wrong)
    compared = sum(one.compared for one in found)
    status = Status.FAIL if wrong else Status.PASS if compared else Status.NOT_MEASURED
    noise = (
        f"a differing token is a tie below a gap of {FLOAT32_TIE:g}"
        if dtype == "float32"
        else f"a differing token is a tie within {NOISE_TIE:g} RMS errors of Hugging Face's own {dtype} logits"
    )
    return Verdict(
        claim="After the same tokens, every greedy token is Hugging Face's first choice.",
        metric="tokens that differ by more than a tie",
        estimate=float(len(wrong)) if compared else None,
        bound=0.0,
        bound_source=noise,
        n=compared,
        status=status,
        evidence={"ties": ties, "differing": wrong[:20]},
    )
