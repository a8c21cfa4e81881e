"""Environment variables: switches that are on, and values set for a while."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence

_ON = ("1", "true", "yes", "on")


def switched_on(names: str | Sequence[str], environment: Mapping[str, str] | None = None) -> str | None:
    """Return the first of several spellings of a switch that is on: 1, true, yes or on, in any case; or None."""
    values = os.environ if environment is None else environment
    spellings = (names,) if isinstance(names, str) else names
    return next((name for name in spellings if values.get(name, "").lower() in _ON), None)


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables inside the block, and put back what was there."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
