"""A record of which implementations were chosen, how often, and what had to be passed over."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Choice(NamedTuple):
    """What was chosen for a call and why the others were not.

    `fallback`: one of the others is made for this device and better, and had to be passed over.
    """

    implementation: str
    reason: str
    refused: tuple[tuple[str, str], ...]
    fallback: bool = False


_RECEIPT: Counter[tuple[str, Choice]] = Counter()


def record(operator: str, choice: Choice) -> None:
    """Count a choice."""
    _RECEIPT[(operator, choice)] += 1


def receipt() -> dict[str, list[dict[str, Any]]]:
    """Report what ran since `reset_receipt`: per operator each implementation, how often it was chosen, and why.

    A compiled graph chooses while it is traced: its `selections` count call sites, not calls.
    """
    out: dict[str, list[dict[str, Any]]] = {}
    for (name, choice), selections in sorted(_RECEIPT.items(), key=lambda item: (item[0][0], -item[1])):
        out.setdefault(name, []).append(
            {
                "implementation": choice.implementation,
                "selections": selections,
                "reason": choice.reason,
                "refused": dict(choice.refused),
                "fallback": choice.fallback,
            }
        )
    return out


def count_fallbacks(operators: Mapping[str, list[dict[str, Any]]]) -> dict[str, int]:
    """Count by operator how often something better, made for this device, had to be passed over.

    Args:
        operators: a `receipt()`.
    """
    counts = {name: sum(row["selections"] for row in rows if row.get("fallback")) for name, rows in operators.items()}
    return {name: count for name, count in counts.items() if count}


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Leave what runs inside the block out of the receipt."""
    before = _RECEIPT.copy()
    try:
        yield
    finally:
        _RECEIPT.clear()
        _RECEIPT.update(before)


def reset_receipt() -> None:
    """Forget what ran so far."""
    _RECEIPT.clear()
