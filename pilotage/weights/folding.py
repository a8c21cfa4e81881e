"""Names of repeated layers, folded for people: `model.layers.0-17.mlp.up_proj.weight` for eighteen lines."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Folded:
    """Entries of one name pattern with the same value.

    Attributes:
        name: with the numbers folded, e.g. "model.layers.0-4,6-10.self_attn.q_proj.weight".
        value: what all of them have.
        members: how many there are.
    """

    name: str
    value: Any
    members: int


def fold(entries: Iterable[tuple[str, Any]]) -> list[Folded]:
    """Fold (name, value) pairs whose names differ in the first number only and whose values, which
    must be hashable, are equal.

    The order is that of each pattern's first member.
    """
    groups: dict[tuple[str, str, Any], list[int | None]] = {}
    for name, value in entries:
        found = re.search(r"(?<=\.)\d+(?=\.)", name)
        if found is None:
            groups.setdefault((name, "", value), []).append(None)
        else:
            groups.setdefault((name[: found.start()], name[found.end() :], value), []).append(int(found[0]))
    result = []
    for (before, after, value), numbers in groups.items():
        layers = sorted(number for number in numbers if number is not None)
        result.append(Folded(before + ranges(layers) + after, value, len(numbers)))
    return result


def ranges(numbers: list[int]) -> str:
    """Write sorted numbers as ranges: [0, 1, 2, 5] -> "0-2,5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)
