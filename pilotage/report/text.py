"""Numbers and statuses as a reader sees them. Absent values become a dash, never a zero."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pilotage.core.nouns import Status

DASH = "–"

# A status is told by word and sign, never by colour alone.
WORDS: Mapping[Status, str] = {Status.PASS: "pass", Status.FAIL: "fail", Status.NOT_MEASURED: "not measured"}
SIGNS: Mapping[Status, str] = {Status.PASS: "✓", Status.FAIL: "✗", Status.NOT_MEASURED: "○"}


def status_of(value: Any) -> Status:
    """Read a status from JSON; whatever is missing or unknown counts as not measured."""
    try:
        return Status(value)
    except ValueError:
        return Status.NOT_MEASURED


def number(value: Any) -> float | None:
    """A finite float, or None for anything else (booleans included)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def num(value: Any, digits: int = 3) -> str:
    """Three significant digits: `0.0123`, `1,240`, `3.1e-06`."""
    found = number(value)
    if found is None:
        return DASH
    if found == 0:
        return "0"
    if not isinstance(value, int):
        found = float(f"{found:.{digits - 1}e}") if abs(found) < 10 ** (digits - 1) else found
    size = abs(found)
    if isinstance(value, int) or (found.is_integer() and size < 1e6):
        return f"{int(found):,}"
    if size >= 1e6 or size < 1e-3:
        return f"{found:.{digits - 1}e}"
    if size >= 10 ** (digits - 1):
        return f"{found:,.0f}"
    return f"{found:.{max(0, digits - 1 - math.floor(math.log10(size)))}f}"


def seconds(value: Any) -> str:
    """A duration: `3.4 s`, `41 s`, `2 min 05 s`."""
    found = number(value)
    if found is None:
        return DASH
    if found < 0.95:
        return f"{found * 1000:.0f} ms"
    if found < 10:
        return f"{found:.1f} s"
    if found < 59.5:
        return f"{found:.0f} s"
    minutes, rest = divmod(round(found), 60)
    return f"{minutes} min {rest:02d} s"


def size(value: Any) -> str:
    """A number of bytes: `512 B`, `1.2 MB` (decimal units)."""
    found = number(value)
    if found is None:
        return DASH
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if found >= factor:
            return f"{found / factor:.3g} {unit}"
    return f"{found:.0f} B"


def interval(value: Any) -> str:
    """An interval `[low, high]`, or a dash."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return DASH
    return f"{num(value[0])} … {num(value[1])}"


def plain(value: Any, limit: int = 400) -> str:
    """Any JSON value as one line of text, cut at `limit` characters."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return num(value)
    if isinstance(value, Mapping):
        text = ", ".join(f"{key} {plain(item)}" for key, item in value.items())
    elif isinstance(value, list | tuple):
        text = ", ".join(plain(item) for item in value)
    else:
        text = str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def visible(value: str) -> str:
    """Text with its control and private characters spelled out, so that what a model said can be seen."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in value
    )
