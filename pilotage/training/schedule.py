"""The learning rate at a step. Pure."""

from __future__ import annotations

import math


def factor(step: int, *, steps: int, warmup_steps: int, kind: str, final: float) -> float:
    """Return the share of the peak learning rate that a step uses.

    Args:
        step: from 0.
        steps: of the run; the last one, `steps - 1`, has `final`.
        warmup_steps: the first has 1 / warmup_steps, the last of them 1.
        kind: "cosine", "linear" or "constant" after that.
        final: share at the last step, for all but "constant".
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind == "constant":
        return 1.0
    left = steps - 1 - warmup_steps
    done = (step - warmup_steps) / left if left > 0 else 1.0
    shape = 0.5 * (1 + math.cos(math.pi * done)) if kind == "cosine" else 1.0 - done
    return final + (1.0 - final) * shape
