"""The page in a real browser: it loads, says nothing on the console, asks the network for nothing, and draws."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import samples

from pilotage.core.nouns import Status
from pilotage.report import compare
from pilotage.report import page as report_page
from pilotage.report.browser import ARGUMENTS, chromium

pytestmark = pytest.mark.browser
INSTALL = Path(__file__).parents[3] / "scripts" / "install-chromium.sh"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is part of the dev extra")
    if chromium() is None:
        said = subprocess.run(["bash", str(INSTALL)], capture_output=True, text=True, check=False).stderr.strip()
        if chromium() is None:
            pytest.fail(f"no Chromium, and it could not be installed: {said or 'no message'}")
    with playwright_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium(), args=ARGUMENTS)
        yield started
        started.close()


def opened(browser: Any, path: Path, **context: Any) -> tuple[Any, list[str], list[str]]:
    """Open `path`; returns the page, what its console said and what it asked for."""
    page = browser.new_context(viewport={"width": 1184, "height": 900}, **context).new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri(), wait_until="networkidle")
    return page, said, asked


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_loads_without_errors_or_requests_and_draws(browser: Any, tmp_path: Path, scheme: str) -> None:
    path = report_page.build(samples.write_run(tmp_path))
    page, said, asked = opened(browser, path, color_scheme=scheme)
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]
    assert "Verified" in page.inner_text(".verdict")
    visible = [box for box in (plot.bounding_box() for plot in page.query_selector_all("svg.plot")) if box]
    assert len(visible) >= 8 and all(box["width"] > 150 and box["height"] > 60 for box in visible)
    # The curves are painted in the page's colours: not black, not transparent, target and baseline told apart.
    strokes = {
        css: page.eval_on_selector(f"svg.plot .line.{css}", "e => getComputedStyle(e).stroke")
        for css in ("target", "baseline")
    }
    assert strokes["target"] != strokes["baseline"] and "none" not in strokes.values()
    assert page.eval_on_selector("svg.plot .line.target", "e => e.getTotalLength()") > 100
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_maps_and_culprits_are_painted(browser: Any, tmp_path: Path, scheme: str) -> None:
    validate = samples.record("validate", Status.FAIL, result=samples.validate(fault=3.0))
    path = report_page.build(samples.write_run(tmp_path, validate=validate, **samples.extras(fault=True)))
    page, said, asked = opened(browser, path, color_scheme=scheme)
    assert said == [] and [url for url in asked if not url.startswith("data:")] == [path.as_uri()]
    steps = {
        css: page.eval_on_selector(f"svg .{css}", "e => getComputedStyle(e).fill")
        for css in ("h0", "h1", "h2", "h3", "h4", "h5")
    }
    assert len(set(steps.values())) == 6 and "none" not in steps.values(), steps
    maps = [box for box in (e.bounding_box() for e in page.query_selector_all("#localise svg.heat")) if box]
    assert len(maps) == 2 and all(box["width"] > 500 and box["height"] > 300 for box in maps)
    assert page.eval_on_selector("svg.depth .line.target", "e => e.getTotalLength()") > 200
    frame = page.query_selector("#localise svg .frame").bounding_box()
    label = page.query_selector("#localise svg text.culprit").bounding_box()
    assert frame and label and frame["width"] > 300
    cells = page.eval_on_selector_all("#kv ~ .two svg rect", "all => all.length")
    assert cells > 30
    assert "chunking" in page.inner_text("#invariance table.matrix")
    page.context.close()


def test_two_runs_side_by_side(browser: Any, tmp_path: Path) -> None:
    before = samples.write_run(tmp_path / "a", **samples.extras(fault=True))
    after = samples.write_run(tmp_path / "b", **samples.extras())
    path = compare.build(compare.compare(before, after), tmp_path / "compare.html")
    page, said, asked = opened(browser, path)
    assert said == [] and [url for url in asked if not url.startswith("data:")] == [path.as_uri()]
    assert "▲ better" in page.inner_text("#invariance") and len(page.query_selector_all(".verdict")) == 2
    for width in (1184, 420):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.context.close()


@pytest.mark.parametrize("width", [1184, 420])
def test_it_never_scrolls_sideways(browser: Any, tmp_path: Path, width: int) -> None:
    hostile = samples.record("smoke", Status.FAIL, reason="x" * 400)
    path = report_page.build(samples.write_run(tmp_path, smoke=hostile, **samples.extras(fault=True)))
    page, _, _ = opened(browser, path)
    page.set_viewport_size({"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_legible(browser: Any, tmp_path: Path, scheme: str) -> None:
    """Contrast of all text with its background, by the WCAG formula: at least 4.5."""
    path = report_page.build(samples.write_run(tmp_path, leave_out=("bench",), **samples.extras(fault=True)))
    page, _, _ = opened(browser, path, color_scheme=scheme)
    poor = page.evaluate(
        """() => {
        const parse = c => (c.match(/[\\d.]+/g) || []).map(Number);
        const lum = ([r, g, b]) => [r, g, b].map(v => v / 255)
            .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
            .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
        const background = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
            if (c.length === 3 || c[3] > 0) return c; } return [255, 255, 255]; };
        const poor = [];
        for (const e of document.querySelectorAll('body *')) {
            if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) || e.closest('svg, .skip')) continue;
            const [a, b] = [lum(parse(getComputedStyle(e).color)), lum(background(e))].sort((x, y) => y - x);
            const ratio = (a + .05) / (b + .05);
            if (ratio < 4.5) poor.push([e.tagName, e.className, e.textContent.trim().slice(0, 30), ratio]);
        }
        return poor; }"""
    )
    assert poor == []
    page.context.close()


def test_it_prints(browser: Any, tmp_path: Path) -> None:
    path = report_page.build(samples.write_run(tmp_path))
    page, said, _ = opened(browser, path)
    printed = page.pdf(format="A4")
    assert printed.startswith(b"%PDF") and len(printed) > 20_000 and said == []
    page.context.close()
