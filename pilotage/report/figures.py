"""Hand-written SVG figures: no script, no external font, colours from the page's own variables.

Every figure is small, has a title and a description for screen readers, and tells its lines apart by dash as well as
by colour. Numbers in come from JSON; nothing textual goes into the SVG without being escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

MAX_POINTS = 220  # a line of more points is thinned: the page must stay small

MAX_MARKED = 60  # a line of up to so many points has them marked

_LEFT, _RIGHT, _TOP, _BOTTOM = 40.0, 8.0, 14.0, 18.0


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve: `css` names its class (colour and dash), `points` are (position, value)."""

    label: str
    css: str
    points: Sequence[tuple[float, float]]


def _finite(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def thin(points: Sequence[tuple[float, float]], limit: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Keep at most about `limit` points: of each group the smallest and the largest, so that no spike disappears."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(len(points) / (limit / 2))
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        low, high = min(group, key=lambda p: p[1]), max(group, key=lambda p: p[1])
        kept += sorted({low, high})
    return kept


def decades(values: Sequence[float]) -> tuple[int, int]:
    """The powers of ten that enclose the positive values: `decades([0.02, 3.0]) == (-2, 1)`."""
    positive = [value for value in values if value > 0]
    if not positive:
        return -1, 0
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    return low, max(high, low + 1)


_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _power(exponent: int) -> str:
    return "10" + str(exponent).translate(_SUPERSCRIPT) if exponent not in (0, 1) else ("1" if exponent == 0 else "10")


def _polyline(points: Sequence[tuple[float, float]], css: str) -> str:
    return f'<polyline class="line {css}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def error_panel(
    *,
    title: str,
    lines: Sequence[Line],
    y_decades: tuple[int, int],
    x_range: tuple[float, float],
    decode_from: float | None,
    width: float = 300,
    height: float = 150,
) -> Markup:
    """Error against position on a logarithmic axis.

    Args:
        title: heading of the panel.
        lines: the curves; zeros are drawn on the floor of the axis.
        y_decades: lowest and highest power of ten of the axis, shared by the panels of one row.
        x_range: first and last position of the axis.
        decode_from: position from which tokens were decoded one at a time; shaded, and marked by a rule.
        width: in CSS pixels; height: likewise.
    """
    low, high = y_decades
    x0, x1 = x_range
    inner_w, inner_h = width - _LEFT - _RIGHT, height - _TOP - _BOTTOM

    def px(x: float) -> float:
        return _LEFT + (x - x0) / ((x1 - x0) or 1) * inner_w

    def py(y: float) -> float:
        value = math.log10(y) if y > 0 else low
        return _TOP + (high - min(max(value, low), high)) / (high - low) * inner_h

    parts: list[str] = []
    if decode_from is not None and x0 < decode_from <= x1:
        x = px(decode_from)
        parts.append(
            f'<rect class="phase" x="{x:.1f}" y="{_TOP}" width="{_LEFT + inner_w - x:.1f}" height="{inner_h:.1f}"/>'
        )
        # The label goes where there is room for it.
        anchor = "start" if x < _LEFT + inner_w - 40 else "end"
        at = x + 3 if anchor == "start" else x - 3
        label = "decode →" if anchor == "start" else "decode"
        parts.append(f'<text class="note" x="{at:.1f}" y="{_TOP + 9}" text-anchor="{anchor}">{label}</text>')
    step = max(1, math.ceil((high - low) / 5))
    for exponent in range(low, high + 1):
        y = py(10.0**exponent)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_LEFT + inner_w:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        if (exponent - low) % step == 0:
            parts.append(
                f'<text class="tick" x="{_LEFT - 5}" y="{y + 3:.1f}" text-anchor="end">{_power(exponent)}</text>'
            )
    for x, anchor in ((x0, "start"), ((x0 + x1) / 2, "middle"), (x1, "end")):
        parts.append(f'<text class="tick" x="{px(x):.1f}" y="{height - 5}" text-anchor="{anchor}">{x:.0f}</text>')
    for line in lines:
        points = [(px(x), py(y)) for x, y in thin(_finite(line.points))]
        if len(points) == 1:
            parts.append(f'<circle class="dot {line.css}" cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="2"/>')
        elif points:
            parts.append(_polyline(points, line.css))
            if len(points) <= MAX_MARKED:
                # Few positions, perhaps with gaps between them: each is marked, so that the line promises nothing.
                parts += [f'<circle class="dot {line.css}" cx="{x:.1f}" cy="{y:.1f}" r="1.7"/>' for x, y in points]
    described = "; ".join(f"{line.label}: {len(line.points)} positions" for line in lines)
    return Markup(
        f'<svg class="plot" role="img" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}"><title>{escape(title)}</title><desc>{escape(described)}</desc>'
        f'<text class="name" x="{_LEFT}" y="9">{escape(title)}</text>{"".join(parts)}</svg>'
    )


@dataclass(frozen=True, kw_only=True)
class Interval:
    """One row of a ratio figure: an estimate with its interval."""

    value: float
    low: float | None
    high: float | None


def ratio_scale(rows: Sequence[Interval], marks: Sequence[float] = (1.0,)) -> tuple[float, float]:
    """The range of a logarithmic ratio axis that holds all rows and marks, with a little air."""
    values = [v for row in rows for v in (row.value, row.low, row.high) if v is not None and v > 0]
    values += [mark for mark in marks if mark > 0]
    low, high = min(values), max(values)
    return low / 1.15, high * 1.15


def ratio_bar(
    row: Interval, *, scale: tuple[float, float], marks: Sequence[float] = (1.0,), css: str = "", width: float = 220
) -> Markup:
    """An estimate and its interval on a logarithmic axis with `marks` (1 = equal, or the bound)."""
    height = 16.0
    low, high = math.log(scale[0]), math.log(scale[1])

    def px(value: float) -> float:
        clipped = min(max(math.log(value), low), high) if value > 0 else low
        return 4 + (clipped - low) / (high - low) * (width - 8)

    parts = [
        f'<line class="{"mark" if index == 0 else "mark bound"}" x1="{px(mark):.1f}" x2="{px(mark):.1f}" '
        f'y1="0" y2="{height}"/>'
        for index, mark in enumerate(marks)
    ]
    if row.low is not None and row.high is not None:
        parts.append(
            f'<line class="whisker {css}" x1="{px(row.low):.1f}" x2="{px(row.high):.1f}" '
            f'y1="{height / 2}" y2="{height / 2}"/>'
        )
    parts.append(f'<circle class="dot {css}" cx="{px(row.value):.1f}" cy="{height / 2}" r="3.5"/>')
    interval = f", interval {row.low:.3g} to {row.high:.3g}" if row.low is not None and row.high is not None else ""
    return Markup(
        f'<svg class="ratio" role="img" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}"><title>{row.value:.3g}{interval}</title>{"".join(parts)}</svg>'
    )


def bar(share: float, *, width: float = 120, css: str = "") -> Markup:
    """A bar as long as `share` (0 to 1) of `width`."""
    share = min(max(share, 0.0), 1.0) if math.isfinite(share) else 0.0
    return Markup(
        f'<svg class="bar" aria-hidden="true" viewBox="0 0 {width:.0f} 10" width="{width:.0f}" height="10">'
        f'<rect class="rail" width="{width:.0f}" height="10" rx="2"/>'
        f'<rect class="fill {escape(css)}" width="{max(share * width, 1.0 if share > 0 else 0.0):.1f}" '
        f'height="10" rx="2"/></svg>'
    )
