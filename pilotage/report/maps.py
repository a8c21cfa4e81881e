"""Heat maps and the course of errors through a model, as SVG that stays small.

A heat map has six steps, not a continuum: a reader wants to know which side of the bound a cell is on, and runs of
equal cells are one rectangle. Colours come from the page; the step is told by lightness as well as by hue.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

# In units of the bound: from here on a cell is darker. The third step is the bound itself.
STEPS = (0.25, 0.6, 1.0, 3.0, 30.0)
WORDS = ("under a quarter of the bound", "under 0.6", "within the bound", "over it", "over 3 times", "over 30 times")
MAX_ROWS = 420
_CELL_H = 9.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a heat map.

    Attributes:
        label: shown at its left.
        values: in units of the bound, one a column; None where nothing was measured.
        marked: it is a culprit: drawn with a frame and a mark in words.
    """

    label: str
    values: Sequence[float | None]
    marked: bool = False


def step(value: float) -> int:
    """Return the step of a value in units of the bound, 0 to 5; what is no number is the last."""
    return len(STEPS) if math.isnan(value) else sum(value > edge for edge in STEPS)


def heat_map(
    rows: Sequence[Row],
    *,
    title: str,
    columns: Sequence[tuple[float, str]],
    width: float = 640,
    label_width: float = 190,
) -> Markup:
    """Draw a heat map.

    Args:
        rows: top to bottom; those past `MAX_ROWS` are left out, marked ones and the darkest last.
        title: for the figure and screen readers.
        columns: labels of the horizontal axis as (share of the width, text).
        width: in CSS pixels; label_width: of that, for the labels of the rows.
    """
    shown = _chosen(rows)
    inner = width - label_width - 8
    top, height = 16.0, _CELL_H * len(shown)
    parts: list[str] = []
    for index, row in enumerate(shown):
        y = top + index * _CELL_H
        cell = inner / max(1, len(row.values))
        label = _short(row.label)
        css = "tick culprit" if row.marked else "tick"
        mark = "▸ " if row.marked else ""
        parts.append(
            f'<text class="{css}" x="{label_width - 4:.0f}" y="{y + _CELL_H - 2:.1f}" text-anchor="end">{mark}'
            f"{escape(label)}</text>"
        )
        for first, last, found in _runs(row.values):
            if found is not None:
                parts.append(
                    f'<rect class="h{found}" x="{label_width + first * cell:.1f}" y="{y:.1f}" '
                    f'width="{(last - first) * cell:.1f}" height="{_CELL_H - 1:.0f}"/>'
                )
        if row.marked:
            parts.append(
                f'<rect class="frame" x="{label_width:.0f}" y="{y - 0.5:.1f}" width="{inner:.1f}" '
                f'height="{_CELL_H:.0f}"/>'
            )
    for share, text in columns:
        anchor = "start" if share <= 0 else "end" if share >= 1 else "middle"
        parts.append(
            f'<text class="tick" x="{label_width + share * inner:.1f}" y="{top + height + 11:.1f}" '
            f'text-anchor="{anchor}">{escape(text)}</text>'
        )
    left_out = f", {len(rows) - len(shown)} more in the JSON" if len(rows) > len(shown) else ""
    marked = ", ".join(row.label for row in rows if row.marked)
    described = f"{len(rows)} rows{left_out}" + (f"; marked: {marked}" if marked else "")
    total = top + height + 16
    return Markup(
        f'<svg class="heat" role="img" viewBox="0 0 {width:.0f} {total:.0f}" width="{width:.0f}" '
        f'height="{total:.0f}"><title>{escape(title)}</title><desc>{escape(described)}</desc>'
        f'<text class="name" x="{label_width:.0f}" y="10">{escape(title)}</text>{"".join(parts)}</svg>'
    )


def _chosen(rows: Sequence[Row]) -> list[Row]:
    if len(rows) <= MAX_ROWS:
        return list(rows)

    def darkness(row: Row) -> float:
        return math.inf if row.marked else max((v for v in row.values if v is not None), default=-1.0)

    kept = {id(row) for row in sorted(rows, key=darkness)[-MAX_ROWS:]}
    return [row for row in rows if id(row) in kept]


def _short(label: str) -> str:
    text = label.removeprefix("model.").replace("layers.", "")
    text = f"layer {text}" if text.isdigit() else text
    return text if len(text) <= 34 else "…" + text[-33:]


def _runs(values: Sequence[float | None]) -> list[tuple[int, int, int | None]]:
    """Join neighbours of one step: (first, last + 1, step)."""
    found: list[tuple[int, int, int | None]] = []
    for index, value in enumerate(values):
        at = None if value is None else step(value)
        if found and found[-1][2] == at:
            found[-1] = (found[-1][0], index + 1, at)
        else:
            found.append((index, index + 1, at))
    return found


def legend() -> Markup:
    """The steps in words."""
    items = "".join(
        f'<li><svg width="16" height="10" aria-hidden="true"><rect class="h{index}" width="16" height="10"/></svg>'
        f"{word}</li>"
        for index, word in enumerate(WORDS)
    )
    return Markup(f'<ul class="legend heat">{items}</ul>')


def depth_panel(
    sites: Sequence[str],
    curves: Mapping[str, Sequence[float | None]],
    *,
    title: str,
    culprits: Sequence[str] = (),
    width: float = 900,
    height: float = 190,
) -> Markup:
    """Draw errors by depth, on a logarithmic axis: one point a site, in the order of the model.

    Args:
        sites: names along the axis.
        curves: css class ("target", "baseline") -> value at each site.
        title: heading.
        culprits: sites marked by a rule and their name.
        width, height: in CSS pixels.
    """
    values = [v for points in curves.values() for v in points if v is not None and v > 0]
    if not values or len(sites) < 2:
        return Markup("")
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    left, right, top, bottom = 40.0, 8.0, 26.0, 20.0
    inner_w, inner_h = width - left - right, height - top - bottom

    def px(index: int) -> float:
        return left + index / (len(sites) - 1) * inner_w

    def py(value: float) -> float:
        at = math.log10(value) if value > 0 else low
        return top + (high - min(max(at, low), high)) / (high - low) * inner_h

    parts: list[str] = []
    every = max(1, math.ceil((high - low) / 5))
    for exponent in range(low, high + 1):
        y = py(10.0**exponent)
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right:.0f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        if (exponent - low) % every == 0:
            parts.append(f'<text class="tick" x="{left - 5}" y="{y + 3:.1f}" text-anchor="end">1e{exponent}</text>')
    for index, text in ((0, sites[0]), (len(sites) - 1, sites[-1])):
        anchor = "start" if index == 0 else "end"
        parts.append(
            f'<text class="tick" x="{px(index):.1f}" y="{height - 6:.0f}" text-anchor="{anchor}">'
            f"{escape(_short(text))}</text>"
        )
    at_fault = [(index, site) for index, site in enumerate(sites) if site in culprits]
    for index, _ in at_fault:
        x = px(index)
        parts.append(f'<line class="blame" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.0f}" y2="{top + inner_h:.0f}"/>')
    for index, site in at_fault[:1]:  # one name fits; the description has them all
        anchor = "start" if px(index) < width * 0.6 else "end"
        parts.append(
            f'<text class="tick culprit" x="{px(index):.1f}" y="{top - 3:.0f}" text-anchor="{anchor}">▾ '
            f"{escape(_short(site))}</text>"
        )
    for css, points in curves.items():
        drawn = [(px(i), py(v)) for i, v in enumerate(points) if v is not None and math.isfinite(v)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
        parts.append(f'<polyline class="line {escape(css)}" points="{line}"/>')
    described = "; ".join(f"{css}: {len(points)} sites" for css, points in curves.items())
    if culprits:
        described += f"; marked: {', '.join(culprits)}"
    return Markup(
        f'<svg class="plot depth" role="img" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}"><title>{escape(title)}</title><desc>{escape(described)}</desc>'
        f'<text class="name" x="{left}" y="10">{escape(title)}</text>{"".join(parts)}</svg>'
    )


def difference_bar(value: float, low: float | None, high: float | None, *, css: str = "", width: float = 220) -> Markup:
    """A difference and its interval on a linear axis with 0 in the middle."""
    reach = max(abs(x) for x in (value, low or 0.0, high or 0.0, 0.01)) * 1.1

    def px(x: float) -> float:
        return 4 + (x + reach) / (2 * reach) * (width - 8)

    parts = [f'<line class="mark" x1="{px(0):.1f}" x2="{px(0):.1f}" y1="0" y2="16"/>']
    if low is not None and high is not None:
        parts.append(f'<line class="whisker {css}" x1="{px(low):.1f}" x2="{px(high):.1f}" y1="8" y2="8"/>')
    parts.append(f'<circle class="dot {css}" cx="{px(value):.1f}" cy="8" r="3.5"/>')
    said = f"{value:+.3g}" + (f", interval {low:+.3g} to {high:+.3g}" if low is not None and high is not None else "")
    return Markup(
        f'<svg class="ratio" role="img" viewBox="0 0 {width:.0f} 16" width="{width:.0f}" height="16">'
        f"<title>{said}</title>{''.join(parts)}</svg>"
    )
