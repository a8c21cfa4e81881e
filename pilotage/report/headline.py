"""The verdict that opens the page: one word, one sentence, and the numbers that carry it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pilotage.core.nouns import Status, worst
from pilotage.report import benchmark
from pilotage.report.record import EXTRAS, STAGES, Records
from pilotage.report.text import DASH, num, number, seconds, status_of

_WORD = {Status.PASS: "Verified", Status.FAIL: "Failed", Status.NOT_MEASURED: "Not verified"}


def stage_cards(records: Records) -> list[dict[str, Any]]:
    """One card a stage, in order; a stage without a record is not measured, an extra check without one is not there."""
    cards = []
    extras = [extra for extra in EXTRAS if extra.name in records.stages or extra.name in records.unreadable]
    # Between validation, whose number they share, and the benchmark.
    for stage in sorted((*STAGES, *extras), key=lambda found: found.number):
        record = records.stages.get(stage.name)
        if record is not None:
            status, summary, reason, took = record.status, record.summary, record.reason, record.seconds
        else:
            status, took = Status.NOT_MEASURED, None
            reason = records.unreadable.get(stage.name, "this stage has not been run")
            summary = "not measured"
        cards.append(
            {
                "name": stage.name,
                "number": stage.number,
                "title": stage.title,
                "question": stage.question,
                "status": status,
                "summary": summary,
                "reason": reason,
                "seconds": took,
                "log": record.log if record is not None else None,
            }
        )
    return cards


def overall(records: Records) -> Status:
    """The worst of all stages; a stage without a record keeps the voyage from passing."""
    return worst([card["status"] for card in stage_cards(records)])


def headline(records: Records) -> dict[str, Any]:
    """The word and the sentence at the top of the page."""
    cards = stage_cards(records)
    status = worst([card["status"] for card in cards])
    failed = [card for card in cards if card["status"] is Status.FAIL]
    missing = [card for card in cards if card["status"] is Status.NOT_MEASURED]
    if failed:
        sentence = " ".join(f"{card['title']}: {card['reason'] or card['summary']}." for card in failed[:3])
        if missing:
            sentence += f" Not measured: {', '.join(card['title'].lower() for card in missing)}."
    elif missing:
        reasons = "; ".join(f"{card['title'].lower()} ({card['reason'] or card['summary']})" for card in missing[:3])
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        sentence = f"Not measured: {reasons}{more}. What was measured passed."
        if len(missing) == len(cards):
            sentence = f"Nothing was measured: {reasons}{more}."
    else:
        sentence = (
            "Every tensor of the checkpoint is accounted for, and served through vLLM the model stays within the "
            "error that its dtype costs Hugging Face itself, token by token and module by module."
        )
    return {"status": status, "word": _WORD[status], "sentence": sentence}


def _arm_figure(validate: Mapping[str, Any]) -> list[dict[str, Any]]:
    tiles = []
    for arm in validate.get("arms") or []:
        verdicts = [v for v in arm.get("verdicts") or [] if number(v.get("estimate")) is not None]
        # The error over all rows stands for the arm, unless another of its verdicts failed.
        failed = [v for v in verdicts if status_of(v.get("status")) is Status.FAIL]
        overall = [v for v in verdicts if v.get("metric") == "rms_ratio"]
        if not (failed or overall):
            continue
        top = (failed or overall)[0]
        metric = str(top.get("metric")).replace("_", " ")
        tiles.append(
            {
                "label": f"error against HF, {arm.get('arm')}",
                "value": f"{num(top.get('estimate'))}×",
                "note": f"{metric}; bound {num(top.get('bound'))}, n = {num(top.get('n'))}",
                "status": status_of(arm.get("status")),
            }
        )
    return tiles


def _tile(label: str, value: str, note: str, status: Status | None = None) -> dict[str, Any]:
    return {"label": label, "value": value, "note": note, "status": status}


def key_numbers(records: Records) -> list[dict[str, Any]]:
    """Up to six numbers for the strip under the verdict; only what was measured appears."""
    tiles: list[dict[str, Any]] = []
    validate = records.result("validate")
    if validate:
        tiles += _arm_figure(validate)[:2]
        tokens = [number(arm.get("n_tokens")) for arm in validate.get("arms") or []]
        if any(tokens):
            tiles.append(
                _tile("positions compared", num(sum(int(n) for n in tokens if n)), "teacher-forced, decode included")
            )
    weights = records.result("weights")
    if weights:
        tensors: Sequence[Mapping[str, Any]] = weights.get("tensors") or []
        used = sum(1 for tensor in tensors if tensor.get("action") == "load")
        tiles.append(
            _tile(
                "tensors accounted for",
                f"{num(len(tensors))}",
                f"{num(used)} used once, {num(len(tensors) - used)} dropped with a reason",
                status_of(weights.get("status")),
            )
        )
    smoke = records.result("smoke")
    if smoke:
        buckets = smoke.get("buckets") or []
        cached = sum(1 for bucket in buckets if bucket.get("cached"))
        tiles.append(
            _tile("compile", seconds(smoke.get("compile_s")), f"{len(buckets)} buckets, {cached} from the cache")
        )
    bench = records.result("bench")
    if bench:
        for ratio in benchmark.chosen(bench.get("ratios") or []):
            if number(ratio.get("ratio")) is None or len(tiles) >= 6:
                continue
            tiles.append(
                _tile(
                    f"{ratio.get('load')}, against {ratio.get('against')}",
                    f"{num(ratio.get('ratio'))}×",
                    f"{num(ratio.get('ours'))} / {num(ratio.get('theirs'))} {benchmark.label(ratio.get('metric'))}",
                )
            )
            break
    return tiles[:6] if tiles else [_tile("measured", DASH, "nothing yet")]
