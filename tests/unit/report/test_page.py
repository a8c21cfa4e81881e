"""The page from sample records: what it shows, what it escapes, and that what is missing is never green."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import samples

from pilotage.core import store
from pilotage.core.errors import BadInput
from pilotage.core.nouns import Status
from pilotage.report import headline, page
from pilotage.report.record import STAGES, StageRecord, read

HOSTILE = "<img src=x onerror=alert(1)>\"'&"


def built(directory: Path) -> str:
    return page.build(directory).read_text()


class Outline(HTMLParser):
    """Elements, and the text inside sections, by id."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self.section = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self.section = dict(attrs).get("id") or ""

    def handle_data(self, data: str) -> None:
        self.text[self.section] = self.text.get(self.section, "") + data

    def count(self, tag: str, **attributes: str) -> int:
        return sum(1 for name, found in self.tags if name == tag and attributes.items() <= found.items())


def test_a_whole_run_is_verified_and_shows_every_part(tmp_path: Path) -> None:
    html = built(samples.write_run(tmp_path))
    outline = Outline(html)
    assert "✓ Verified" in html
    assert {"diff", "implement", "register", "weights", "smoke", "validate", "bench", "receipt", "reproduce"} <= set(
        outline.text
    )
    assert "○ not measured" not in outline.text["validate"] + outline.text["bench"] + outline.text["weights"]
    # Two arms with three streams, in L2 and L-inf, and the two at the top.
    assert html.count('class="plot"') == 2 * 3 * 2 + 2
    assert "Attention method" in outline.text["diff"] and "QK-norm" in outline.text["diff"]
    assert "recomputed from the configuration" in outline.text["weights"]
    assert "blocked_cpu" in outline.text["receipt"]
    assert "1.36×" in outline.text["bench"] and "decode-x8" in outline.text["bench"]
    assert "pilotage validate gemma3-270m" in outline.text["reproduce"]
    assert "vllm bench serve --dataset-name random" in outline.text["reproduce"]
    assert "0.32.0" in outline.text["reproduce"]
    assert len(html) < 1_000_000


def test_kernels_that_were_passed_over_are_said_with_the_reason(tmp_path: Path) -> None:
    smoke = samples.smoke()
    smoke["receipt"] = {
        "operators": {
            "flash_attention": [
                {
                    "implementation": "torch",
                    "selections": 18,
                    "refused": {"native_cpu": "head_dim 70 is no multiple of 8"},
                    "reason": "nothing faster",
                    "fallback": True,
                }
            ],
            "rms_norm": [{"implementation": "native_cpu", "selections": 73, "refused": {}, "reason": "priority 10"}],
        },
        "kernel_fallbacks": {"flash_attention": 18},
    }
    html = built(samples.write_run(tmp_path, smoke=samples.record("smoke", result=smoke)))
    said = " ".join(Outline(html).text["receipt"].split())
    assert "passed over at 18 call sites of flash_attention" in said
    assert "fallback: nothing faster" in said and "native_cpu: head_dim 70 is no multiple of 8" in said
    assert html.count('<tr class="none"><td><code>flash_attention') == 1
    # The other stages' receipts name none, and older ones do not say.
    smoke["receipt"]["kernel_fallbacks"] = {}
    none = " ".join(
        Outline(built(samples.write_run(tmp_path, smoke=samples.record("smoke", result=smoke)))).text["receipt"].split()
    )
    assert "Kernel fallbacks: none" in none and "passed over at" not in none
    del smoke["receipt"]["kernel_fallbacks"]
    old = Outline(built(samples.write_run(tmp_path, smoke=samples.record("smoke", result=smoke)))).text["receipt"]
    assert "Kernel fallbacks" not in old.split("validate")[0]


def test_nothing_is_fetched_and_nothing_runs(tmp_path: Path) -> None:
    html = built(samples.write_run(tmp_path))
    outline = Outline(html)
    assert outline.count("script") == 0
    for tag, attributes in outline.tags:
        for name in ("src", "href", "action", "xlink:href"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, name, value)
    assert not re.search(r"@import|url\(", html)
    assert "default-src 'none'" in html


@pytest.mark.parametrize("left_out", [stage.name for stage in STAGES])
def test_a_missing_stage_is_not_measured_and_never_green(tmp_path: Path, left_out: str) -> None:
    html = built(samples.write_run(tmp_path, leave_out=(left_out,)))
    assert "○ Not verified" in html and "✓ Verified" not in html
    outline = Outline(html)
    assert "not measured" in outline.text[left_out]
    assert "✓ pass" not in outline.text[left_out].replace("\n", " ")
    assert headline.overall(read(tmp_path)) is Status.NOT_MEASURED


def test_an_empty_run_is_not_verified(tmp_path: Path) -> None:
    html = built(samples.write_run(tmp_path, leave_out=tuple(stage.name for stage in STAGES)))
    assert "Nothing was measured" in html
    assert "chip pass" not in html and 'class="verdict none"' in html


def test_a_failing_validation_leads_the_page(tmp_path: Path) -> None:
    result = samples.validate(fault=3.0)
    failing = samples.record("validate", Status.FAIL, result=result, reason="“the served model” does not hold")
    html = built(samples.write_run(tmp_path, validate=failing))
    assert "✗ Failed" in html and "Validate: “the served model” does not hold." in html
    assert 'class="verdict fail"' in html and "✓ Verified" not in html


def test_a_crashed_stage_says_what_it_last_said_and_where_its_log_is(tmp_path: Path) -> None:
    crashed = samples.record(
        "smoke", Status.NOT_MEASURED, result=None, completed=False, reason="its process was ended by SIGKILL"
    )
    outline = Outline(built(samples.write_run(tmp_path, smoke=crashed)))
    assert "ended by SIGKILL" in outline.text["smoke"] and "logs/smoke.log" in outline.text["smoke"]


def test_untrusted_text_is_escaped_everywhere(tmp_path: Path) -> None:
    smoke = samples.smoke()
    smoke["prompts"] = [{"prompt": HOSTILE, "text": HOSTILE, "agrees_with_hf": False, "token_ids": []}]
    smoke["buckets"] = [{"kind": HOSTILE, "size": 1, "seconds": 1.0, "cached": False}]
    smoke["receipt"] = {"operators": {HOSTILE: [{"implementation": HOSTILE, "selections": 1, "reason": HOSTILE}]}}
    validate = samples.validate()
    for row in validate["arms"][0]["by_position"]:
        row["stream"] = HOSTILE
    validate["arms"][0]["arm"] = HOSTILE
    validate["modules"][0]["module"] = HOSTILE
    validate["verdicts"][0]["claim"] = HOSTILE
    bench = samples.bench()
    bench["ratios"][0]["load"] = HOSTILE
    bench["arms"]["pilotage"] = {HOSTILE: {HOSTILE: [1.0]}}
    bench["commands"] = [HOSTILE]
    diff = samples.diff()
    diff["models"] = [HOSTILE, HOSTILE]
    diff["checklist"][0] |= {"row": HOSTILE, "fields": [HOSTILE], "block": HOSTILE}
    samples.write_run(
        tmp_path,
        diff=samples.record("diff", result=diff),
        smoke=samples.record("smoke", Status.FAIL, result=smoke, reason=HOSTILE),
        validate=samples.record("validate", result=validate),
        bench=samples.record("bench", result=bench, command=HOSTILE),
    )
    voyage = store.read_json(tmp_path / "voyage.json")
    store.write_json(
        tmp_path / "voyage.json", {**voyage, "model": HOSTILE, "checkpoint": HOSTILE, "versions": {"x": HOSTILE}}
    )
    html = built(tmp_path)
    assert "<img" not in html
    assert html.count("&lt;img src=x onerror=alert(1)&gt;") > 15
    assert Outline(html).count("img") == 0


def test_a_broken_record_is_named_and_not_guessed_at(tmp_path: Path) -> None:
    samples.write_run(tmp_path)
    (tmp_path / "4-validate.json").write_text('{"schema": 1, "stage": "vali')
    outline = Outline(built(tmp_path))
    assert "not valid JSON" in outline.text["validate"]
    store.write_json(tmp_path / "5-bench.json", {"schema": 99})
    assert "schema 99" in Outline(built(tmp_path)).text["bench"]


def test_a_directory_without_a_voyage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not a run directory"):
        page.build(tmp_path)
    with pytest.raises(BadInput, match="no such run directory"):
        page.build(tmp_path / "none")


def test_results_that_leave_things_out_still_render(tmp_path: Path) -> None:
    empty = {name: samples.record(name, Status.NOT_MEASURED, result={}) for name in samples.RESULTS}
    html = built(samples.write_run(tmp_path, **empty))
    assert "Not verified" in html and "chip pass" not in html


def test_numbers_that_are_no_numbers_are_dashes(tmp_path: Path) -> None:
    validate = samples.validate()
    validate["arms"][0]["by_position"][3]["target"]["l2"] = None
    validate["arms"][0]["by_position"][4]["target"]["l2"] = float("nan")
    validate["arms"][0]["verdicts"][0] |= {"estimate": None, "interval": None, "status": "not_measured"}
    html = built(samples.write_run(tmp_path, validate=samples.record("validate", result=validate)))
    assert "nan" not in re.sub(r"<style>.*?</style>", "", html, flags=re.S).lower().replace("financ", "")


def test_a_large_voyage_stays_a_small_page(tmp_path: Path) -> None:
    weights = samples.weights(tensors=3000)
    validate = samples.validate()
    rows = validate["arms"][0]["by_position"]
    validate["arms"][0]["by_position"] = [
        {**row, "stream": stream} for stream in range(40) for row in rows if row["stream"] == 1
    ]
    html = built(
        samples.write_run(
            tmp_path,
            weights=samples.record("weights", result=weights),
            validate=samples.record("validate", result=validate),
        )
    )
    assert len(html.encode()) < 2_000_000
    assert "6 of 40 streams" in html and "more in the JSON" in html


def test_records_read_back_as_written() -> None:
    record = samples.record("smoke")
    assert StageRecord.from_json(record.to_json()) == record
    with pytest.raises(BadInput, match="not a stage record"):
        StageRecord.from_json({"schema": 1, "stage": "smoke", "status": "green", "summary": ""})


def test_a_busy_machine_is_said(tmp_path: Path) -> None:
    quiet = built(samples.write_run(tmp_path))
    assert "busy with other work" not in quiet
    bench = samples.bench()
    bench["machine"]["load_average"] = 20.0
    loud = built(samples.write_run(tmp_path, bench=samples.record("bench", result=bench)))
    assert "load average 20.0 on 2 cores" in loud
