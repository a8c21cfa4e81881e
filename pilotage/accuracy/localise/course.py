"""The course of errors, for maps: each site's by position, and those of the running model by depth."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pilotage.accuracy.localise import score

# Stretches that the positions of a request are drawn together to.
BINS = 24
# What carries the error from layer to layer: the embedding, the output of every layer, the last norm.
STREAM = re.compile(r"(.*\.)?(embed_tokens|layers\.\d+|norm)")


def in_stream(sites: Sequence[str]) -> list[str]:
    """Keep the sites of the residual stream, in their order."""
    return [site for site in sites if STREAM.fullmatch(site)]


def by_position(where: Sequence[tuple[int, int]], by_row: Tensor) -> list[dict[str, Any]]:
    """Return the largest row statistic in each of a few stretches of every request, in units of its bound.

    Args:
        where: request and position of each row.
        by_row: [rows] the row statistic.
    """
    requests: dict[int, list[tuple[int, float]]] = {}
    for (request, position), value in zip(where, by_row.tolist(), strict=True):
        requests.setdefault(request, []).append((position, value / score.BOUNDS["row"]))
    found = []
    for request, rows in requests.items():
        width = -(-len(rows) // BINS)
        parts = [rows[start : start + width] for start in range(0, len(rows), width)]
        found.append(
            {
                "request": request,
                "positions": [part[0][0] for part in parts],
                "row": [score.finite(round(max(value for _, value in part), 3)) for part in parts],
            }
        )
    return found
