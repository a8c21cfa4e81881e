"""Progress for anything that takes more than a few seconds. Goes to standard error, silent when that is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def track(items: Iterable[T], description: str, *, total: int | None = None) -> Iterator[T]:
    """Yield from `items` while a bar with `description` advances."""
    from rich.console import Console
    from rich.progress import track as rich_track

    if total is None and isinstance(items, Sequence):
        total = len(items)
    console = Console(file=sys.stderr)
    return iter(rich_track(items, description, total=total, console=console, disable=not console.is_terminal))
