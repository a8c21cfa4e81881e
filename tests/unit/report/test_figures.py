"""The figures: thinning keeps spikes, axes hold the data, text is escaped."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotage.report import figures, text
from pilotage.report.figures import Interval, Line


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=2000))
def test_thinning_keeps_extremes_and_order(values: list[float]) -> None:
    points = [(float(index), value) for index, value in enumerate(values)]
    kept = figures.thin(points)
    assert len(kept) <= figures.MAX_POINTS + 2
    assert max(y for _, y in kept) == max(values) and min(y for _, y in kept) == min(values)
    assert kept == sorted(kept)


@given(st.lists(st.floats(1e-30, 1e30), min_size=1))
def test_decades_enclose_the_values(values: list[float]) -> None:
    low, high = figures.decades(values)
    assert low < high
    assert 10.0**low <= min(values) * (1 + 1e-9) and max(values) <= 10.0**high * (1 + 1e-9)


def test_curves_stay_inside_the_panel_and_zero_sits_on_the_floor() -> None:
    svg = figures.error_panel(
        title="<b>",
        lines=[Line(label="a", css="target", points=[(0, 0.0), (5, 1e-3), (9, 50.0), (3, math.inf)])],
        y_decades=(-3, 1),
        x_range=(0, 9),
        decode_from=4,
    )
    ((points,),) = [re.findall(r'polyline class="line target" points="([^"]+)"', svg)]
    pairs = [tuple(map(float, pair.split(","))) for pair in points.split()]
    assert len(pairs) == 3 and all(0 <= x <= 300 and 0 <= y <= 150 for x, y in pairs)
    assert pairs[0][1] == max(y for _, y in pairs)
    assert "<b>" not in svg and "&lt;b&gt;" in svg and "decode" in svg


def test_ratio_bars_place_1_between_better_and_worse() -> None:
    rows = [Interval(value=0.5, low=0.4, high=0.6), Interval(value=2.0, low=None, high=None)]
    scale = figures.ratio_scale(rows)
    below, above = (
        re.search(r'circle class="dot " cx="([\d.]+)"', figures.ratio_bar(row, scale=scale)) for row in rows
    )
    mark = re.search(r'class="mark" x1="([\d.]+)"', figures.ratio_bar(rows[0], scale=scale))
    assert below and above and mark
    assert float(below[1]) < float(mark[1]) < float(above[1])


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "–"), (float("nan"), "–"), (True, "–"), (0, "0"), (0.01234, "0.0123"), (1.0, "1"), (1240.6, "1,241"),
     (3.14e-6, "3.14e-06"), (12345678, "12,345,678"), (1.0061, "1.01"), (99.96, "100"), (0.99996, "1"),
     (-0.5, "-0.500")],
)  # fmt: skip
def test_num(value: object, expected: str) -> None:
    assert text.num(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.02, "20 ms"), (3.44, "3.4 s"), (41.2, "41 s"), (125, "2 min 05 s"), (None, "–"), (59.7, "1 min 00 s")],
)
def test_seconds(value: object, expected: str) -> None:
    assert text.seconds(value) == expected


@pytest.mark.parametrize(("value", "expected"), [(12, "12 B"), (1500, "1.5 kB"), (536_000_000, "536 MB"), (None, "–")])
def test_size(value: object, expected: str) -> None:
    assert text.size(value) == expected
