"""What every arm is asked and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pilotage.core.errors import BadInput
from pilotage.core.nouns import Observation


def require_known(arms: Sequence[str], known: Sequence[str]) -> None:
    """Refuse an arm of the command line that is not one of `known`.

    Raises:
        BadInput: it is not.
    """
    unknown = [arm for arm in arms if arm not in known]
    if unknown:
        raise BadInput(f"no arm is called {unknown[0]!r}", where="--arm", do=f"use {' or '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A token stream that every arm is made to follow, whatever it would have said itself.

    Attributes:
        tokens: prompt and continuation.
        prompt: number of prompt tokens, at least 1; the rest is fed back one by one, as in generation.
        positions: ascending positions whose logits are compared; the row at position p predicts token p + 1. The last
            token is never an input, so p + 1 < len(tokens).
    """

    tokens: tuple[int, ...]
    prompt: int
    positions: tuple[int, ...]

    def phase(self, position: int) -> str:
        """Return which step computes the row: "prefill" for the prompt's rows, else "decode"."""
        return "prefill" if position < self.prompt else "decode"


@dataclass(frozen=True, kw_only=True)
class LayerKV:
    """What one layer has cached of one request, keys as attention reads them.

    Attributes:
        layer: "layers.0.self_attn".
        first: position of the first row; more than 0 where a window has passed the others.
        keys: [positions, K, H].
        values: [positions, K, H].
    """

    layer: str
    first: int
    keys: Tensor
    values: Tensor


class Arm(Protocol):
    """An implementation of the model."""

    name: str
    dtype: str

    def observe(self, streams: Sequence[Stream]) -> Observation:
        """Return the logits [positions, V] of each stream at its positions, float32 on the CPU."""
        ...
