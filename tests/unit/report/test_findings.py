"""Where a fault is, on the page: maps, depth, matrix, tasks; and two runs side by side."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import samples
from test_page import HOSTILE, Outline, built

from pilotage.core import store
from pilotage.core.errors import BadInput
from pilotage.core.nouns import Status
from pilotage.report import compare, findings, headline, maps
from pilotage.report.record import EXTRAS, read
from pilotage.voyage import judge


def test_checks_that_were_not_asked_for_are_not_on_the_page(tmp_path: Path) -> None:
    outline = Outline(built(samples.write_run(tmp_path)))
    assert not {"invariance", "localise", "tasks"} & set(outline.text)
    assert headline.overall(read(tmp_path)) is Status.PASS


def test_every_part_is_there_and_the_culprit_is_marked(tmp_path: Path) -> None:
    validate = samples.record("validate", Status.FAIL, result=samples.validate(fault=3.0), reason="too far off")
    html = built(samples.write_run(tmp_path, validate=validate, **samples.extras(fault=True)))
    outline = Outline(html)
    assert len(html.encode()) < 2_500_000
    assert "model.layers.3.self_attn" in outline.text["localise"] and "q_rope" in outline.text["localise"]
    assert "▸ 3.self_attn.q_rope" in html and html.count('class="frame"') == 2  # one an arm
    assert html.count('class="blame"') == 4  # growth and own error, an arm
    assert "tokens 33 to 73" in outline.text["invariance"] and "no speculative decoding" in outline.text["invariance"]
    assert "✗ fail" in outline.text["tasks"] and "exact McNemar" in outline.text["tasks"]
    assert "acc_norm" in outline.text["tasks"] and "the hub cannot be reached" in outline.text["tasks"]
    assert "keys, by head" in html and "values, by position" in html
    assert "invariance, float32, eager" in outline.text["receipt"]
    assert "pilotage localise" in outline.text["reproduce"]
    # The darkest step is where the fault is, and nowhere on a clean run.
    assert re.search(r'class="h[345]" x=', html)
    clean = built(samples.write_run(tmp_path / "clean", **samples.extras()))
    assert not re.search(r'class="h[345]" x=', clean) and "✓ Verified" in clean
    assert 'class="frame"' not in clean and 'class="blame"' not in clean


@pytest.mark.parametrize("name", [extra.name for extra in EXTRAS])
def test_an_extra_check_that_failed_or_broke_is_never_green(tmp_path: Path, name: str) -> None:
    failed = samples.record(name, Status.FAIL, reason="it is wrong")
    html = built(samples.write_run(tmp_path, **{name: failed}))
    assert "✗ Failed" in html and "it is wrong" in html
    broken = samples.record(name, Status.NOT_MEASURED, result=None, completed=False, reason="ended by SIGKILL")
    outline = Outline(built(samples.write_run(tmp_path, **{name: broken})))
    assert "ended by SIGKILL" in outline.text[name] and "chip pass" not in outline.text[name]
    (tmp_path / next(extra for extra in EXTRAS if extra.name == name).file).write_text("{")
    assert "not valid JSON" in Outline(built(tmp_path)).text[name]


@pytest.mark.parametrize("name", [extra.name for extra in EXTRAS])
def test_results_with_holes_and_hostile_text_still_render(tmp_path: Path, name: str) -> None:
    empty = samples.record(name, Status.NOT_MEASURED, result={})
    assert "chip pass" not in Outline(built(samples.write_run(tmp_path, **{name: empty}))).text[name]
    text = json.dumps(samples.EXTRA_RESULTS[name]()).replace("longest", HOSTILE[:8]).replace("q_rope", "<img x>")
    result = json.loads(text.replace("batch mates", "<img a>").replace("acc", "<img b>"))
    html = built(samples.write_run(tmp_path, **{name: samples.record(name, result=result)}))
    assert "<img" not in html


def test_stages_are_judged_from_their_json() -> None:
    clean, broken = samples.invariance(), samples.invariance(broken=True)
    assert judge.invariance(clean)[0] is Status.PASS
    status, summary, reason = judge.invariance(broken)
    assert status is Status.FAIL and "2 broken" in summary
    assert "chunking (chunks of 17; float32, eager) does not hold, prompt 'longest' from position 33" in reason
    assert judge.invariance({})[0] is Status.NOT_MEASURED
    assert judge.localise(samples.localise())[0] is Status.PASS
    status, _, reason = judge.localise(samples.localise(fault=True))
    assert status is Status.FAIL and "model.layers.3.self_attn (q_rope)" in reason
    assert judge.localise({"status": "pass", "culprits": []})[0] is Status.NOT_MEASURED
    assert judge.tasks(samples.tasks())[0] is Status.PASS
    assert judge.tasks(samples.tasks(difference=-0.2))[0] is Status.FAIL
    assert judge.tasks({})[0] is Status.NOT_MEASURED


def test_steps_of_a_map_are_sides_of_the_bound() -> None:
    assert [maps.step(x) for x in (0.0, 0.3, 1.0, 1.01, 5, 1e9, math.inf, math.nan)] == [0, 1, 2, 3, 4, 5, 5, 5]
    rows = [maps.Row(label="a", values=[0.1, 0.1, None, 2.0]), maps.Row(label="b", values=[0.1] * 4, marked=True)]
    svg = str(maps.heat_map(rows, title="t", columns=[(0, "0")]))
    assert svg.count('class="h0"') == 2 and svg.count('class="h3"') == 1  # equal neighbours are one rectangle
    assert "marked: b" in svg


def test_a_huge_model_keeps_its_culprit_and_a_small_page() -> None:
    sites = samples.localise(fault=True, layers=90)
    view = findings.localise_view(sites)
    assert view is not None
    svg = str(view["arms"][0]["map"])
    assert "▸ 3.self_attn.q_rope" in svg and len(svg) < 700_000
    assert "more in the JSON" in svg


def test_two_runs_side_by_side(tmp_path: Path) -> None:
    validate = samples.record("validate", Status.FAIL, result=samples.validate(fault=3.0), reason="too far off")
    before = samples.write_run(tmp_path / "before", validate=validate, **samples.extras(fault=True))
    after = samples.write_run(tmp_path / "after", **samples.extras())
    found = compare.compare(before, after)
    assert not found.worse and [run["word"] for run in found.runs] == ["Failed", "Verified"]
    better = {(line.part, line.name) for line in found.lines if line.change == "better"}
    assert ("stages", "4 Validate") in better and ("culprits", "model.layers.3.self_attn (q_rope)") in better
    assert ("invariance", "chunking; float32, eager") in better and ("tasks", "pilotage_capitals") in better
    assert any(part == "validation" and "bfloat16 error" in name for part, name in better)
    json.dumps(found.to_json(), allow_nan=False)
    back = compare.compare(after, before)
    assert len(back.worse) == len(better)

    page = compare.build(found, tmp_path / "compare.html").read_text()
    outline = Outline(page)
    assert "▲ better" in page and "▼ worse" not in page and outline.count("script") == 0
    assert len(page.encode()) < 500_000
    assert {"stages", "validation", "invariance", "culprits", "tasks", "benchmark"} <= set(outline.text)
    assert "▼ worse" in compare.build(back, tmp_path / "compare.html").read_text()


def test_what_one_run_lacks_is_said_and_not_better_or_worse(tmp_path: Path) -> None:
    plain = samples.write_run(tmp_path / "plain")
    more = samples.write_run(tmp_path / "more", **samples.extras())
    found = compare.compare(plain, more)
    assert not found.worse
    assert {line.change for line in found.lines if line.part in ("invariance", "tasks")} == {"changed"}
    same = compare.compare(plain, plain)
    assert {line.change for line in same.lines} == {"same"}
    with pytest.raises(BadInput):
        compare.compare(plain, tmp_path / "nothing")


def test_another_machine_or_version_is_said(tmp_path: Path) -> None:
    a, b = samples.write_run(tmp_path / "a"), samples.write_run(tmp_path / "b")
    voyage = store.read_json(b / "voyage.json")
    store.write_json(b / "voyage.json", {**voyage, "versions": {"pilotage": "0.1.0", "torch": "9.9"}})
    lines = [line for line in compare.compare(a, b).lines if line.part == "runs"]
    assert [(line.name, line.value_a, line.value_b) for line in lines] == [("versions: torch", "2.13.0", "9.9")]
