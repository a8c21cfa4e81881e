"""Level 1: paired statistics, thresholds, tasks by name and file, and the same answers from every arm."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pilotage.accuracy import level_gates
from pilotage.accuracy.arms import hf
from pilotage.accuracy.tasks import load, paired, run
from pilotage.accuracy.tasks.plan import TaskPlan, threshold
from pilotage.core.errors import BadInput, Unavailable, Unsupported
from pilotage.core.nouns import Status


@pytest.mark.parametrize(
    ("successes", "n", "p"), [(0, 0, 1.0), (0, 10, 2 / 1024), (3, 4, 10 / 16), (5, 10, 1.0), (1, 12, 26 / 4096)]
)
def test_mcnemar_is_exact(successes: int, n: int, p: float) -> None:
    assert paired.binomial_two_sided(successes, n) == pytest.approx(p)


def test_only_items_that_differ_are_noise() -> None:
    """The same 10-point drop: on items in common it is certain, in two independent samples it would be nothing."""
    reference = [1] * 60 + [0] * 40
    target = [1] * 50 + [0] * 50
    found = paired.compare(target, reference)
    assert (found.better, found.worse, found.difference) == (0, 10, pytest.approx(-0.1))
    assert found.p_value == pytest.approx(2 / 1024)
    low, high = found.interval
    assert low < -0.1 < high < 0
    unpaired = math.sqrt((0.6 * 0.4 + 0.5 * 0.5) / 100)
    assert abs(found.difference) < 1.96 * unpaired, "an unpaired test would not see it"


def test_scores_between_0_and_1_get_sign_flips() -> None:
    few = paired.compare([0.5, 0.25, 1.0], [0.25, 0.0, 0.5])
    assert few.test == "sign flips" and few.p_value == pytest.approx(2 / 8)
    generator = torch.Generator().manual_seed(0)
    reference = torch.rand(100, generator=generator).tolist()
    noise = (0.05 * torch.randn(100, generator=generator)).tolist()
    same = paired.compare([a + x for a, x in zip(reference, noise, strict=True)], reference)
    worse = paired.compare([a + x - 0.05 for a, x in zip(reference, noise, strict=True)], reference)
    assert same.p_value > 0.01
    assert worse.p_value < 1e-3
    assert worse.interval[0] < worse.difference < worse.interval[1] < 0


def test_clean_models_raise_no_alarm_and_small_tasks_say_nothing() -> None:
    """Items flip independently in both directions, as rounding makes them."""
    generator = torch.Generator().manual_seed(1)
    statuses = []
    for _ in range(300):
        reference = (torch.rand(214, generator=generator) < 0.6).int()
        flips = torch.rand(214, generator=generator) < 0.02
        found = paired.compare(torch.where(flips, 1 - reference, reference).tolist(), reference.tolist())
        verdict = level_gates.paired(found.difference, found.interval, found.p_value, found.n, task="t", metric="acc")
        statuses.append(verdict.status)
    assert Status.FAIL not in statuses
    assert statuses.count(Status.PASS) > 290
    few = paired.compare([1] * 10, [1] * 10)
    verdict = level_gates.paired(few.difference, few.interval, few.p_value, few.n, task="t", metric="acc")
    assert verdict.status is Status.NOT_MEASURED


@pytest.mark.parametrize(
    ("text", "value", "tolerance"), [("t=0.42", 0.42, None), ("t/acc=45%+-3%", 0.45, 0.03), ("t = 0.5 ± 0.1", 0.5, 0.1)]
)
def test_thresholds_are_read(text: str, value: float, tolerance: float | None) -> None:
    found = threshold(text)
    assert (found.task, found.value, found.tolerance) == ("t", pytest.approx(value), tolerance)


@pytest.mark.parametrize("text", ["t", "t=", "t=high", "=0.4", "t=0.4+-"])
def test_other_texts_are_no_thresholds(text: str) -> None:
    with pytest.raises(BadInput, match=r"TASK=0\.42"):
        threshold(text)


@pytest.mark.parametrize(
    ("score", "low", "high", "status"),
    [
        (0.42, 0.42, None, Status.PASS),
        (0.419, 0.42, None, Status.FAIL),
        (0.48, 0.42, 0.48, Status.PASS),
        (0.5, 0.42, 0.48, Status.FAIL),
        (None, 0.4, None, Status.NOT_MEASURED),
        (math.nan, 0.4, None, Status.NOT_MEASURED),
    ],
)
def test_thresholds_are_judged(score: float | None, low: float, high: float | None, status: Status) -> None:
    verdict = level_gates.threshold(score, None, 50, task="t", metric="acc", low=low, high=high, source="user")
    assert verdict.status is status


WORDS = ["harbour", "river", "pilot", "anchor", "lantern", "channel", "captain", "signal"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two task files with their data beside them: choices, and generation."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": f"{WORDS[i % 8]} {WORDS[i // 8]}", "choices": WORDS[i % 5 : i % 5 + 3], "answer": i % 3}
        for i in range(40)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: rows.jsonl\ntest_split: test\n"
    (folder / "choose.yaml").write_text(
        "task: choose\n" + common + "output_type: multiple_choice\ndoc_to_text: '{{question}} is a'\n"
        "doc_to_choice: '{{choices}}'\ndoc_to_target: answer\n"
        "metric_list:\n  - metric: acc\n  - metric: acc_norm\n"
    )
    (folder / "say.yaml").write_text(
        "task: say\n" + common + "output_type: generate_until\ndoc_to_text: '{{question}} is a'\n"
        "doc_to_target: '{{choices[answer]}}'\ngeneration_kwargs:\n  until: ['e', '.']\n  max_gen_toks: 6\n"
        "metric_list:\n  - metric: exact_match\n"
    )
    return folder


def test_names_files_and_directories(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(load.load(str(tasks / "choose.yaml"))) == ["choose"]
    monkeypatch.chdir("/")
    assert list(load.load(str(tasks))) == ["choose", "say"]
    (task,) = load.load(str(tasks / "choose.yaml")).values()
    assert len(list(task.test_docs())) == 40


def test_what_cannot_be_had_says_so(tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_hub_answers", lambda: False)
    with pytest.raises(BadInput, match="no such task file"):
        load.load("nowhere/at_all.yaml")
    (tmp_path / "broken.yaml").write_text("task: [1")
    with pytest.raises(BadInput, match="cannot be read"):
        load.load(str(tmp_path / "broken.yaml"))
    (tmp_path / "nameless.yaml").write_text("output_type: multiple_choice\n")
    with pytest.raises(BadInput, match="`task:`"):
        load.load(str(tmp_path / "nameless.yaml"))
    (tmp_path / "nodata.yaml").write_text((tasks / "choose.yaml").read_text())
    with pytest.raises(BadInput, match="data cannot be loaded"):
        load.load(str(tmp_path / "nodata.yaml"))
    (tmp_path / "remote.yaml").write_text(
        (tasks / "choose.yaml").read_text().replace("dataset_path: json", "dataset_path: someone/something")
    )
    with pytest.raises(Unavailable, match="hub, which cannot be reached"):
        load.load(str(tmp_path / "remote.yaml"))


@pytest.mark.slow
def test_lm_evals_own_names_without_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_hub_answers", lambda: False)
    with pytest.raises(BadInput, match="did you mean 'arc_easy'"):
        load.load("arc_esy")
    for name in ("arc_easy", "longbench_2wikimqa"):
        with pytest.raises(Unavailable, match="hub, which cannot be reached"):
            load.load(name)


@pytest.fixture(scope="module")
def arm(tiny: Callable[..., Path]) -> Any:
    from transformers import AutoTokenizer

    from pilotage.accuracy.tasks.lm import HFTaskLM

    path = tiny("qwen3")
    loader: Any = AutoTokenizer
    return HFTaskLM(hf.load(path, torch.float32), loader.from_pretrained(path), 64)


def test_hugging_face_scores_what_it_would_say(arm: Any) -> None:
    pairs = [([2, 50, 51, 52], [60]), ([2, 50, 51], [53, 54]), ([2, 9], [10]), ([2, 50, 51, 52], [61])]
    for (context, continuation), (value, greedy) in zip(pairs, arm.scores(pairs), strict=True):
        logits = arm.model(torch.tensor([[*context, *continuation]])).logits[0].log_softmax(-1)
        rows = logits[len(context) - 1 : -1]
        expected = sum(float(rows[i, token]) for i, token in enumerate(continuation))
        assert value == pytest.approx(expected, abs=1e-4)
        assert greedy == (rows.argmax(-1).tolist() == continuation)
    best = int(arm.model(torch.tensor([[2, 9]])).logits[0, -1].argmax())
    assert arm.scores([([2, 9], [best])])[0][1]


def test_generation_stops_where_it_should(arm: Any) -> None:
    prompt = arm.tok_encode("the pilot")
    (free,) = arm.completions([prompt], [12], [])
    assert free
    stop = free[len(free) // 2]
    (cut,) = arm.completions([prompt], [12], [stop])
    assert cut == free[: free.index(stop)]
    (short,) = arm.completions([prompt], [3], [])
    said = hf.generate(arm.model, [prompt], 3)[1][0].tolist()
    assert short == arm.tokenizer.decode(said, skip_special_tokens=True) != free


def test_long_prompts_lose_their_beginning_and_sampling_is_refused(arm: Any) -> None:
    before = arm.truncated
    assert arm._cut(list(range(100)), [1, 2]) == (list(range(38, 100)), [1, 2])
    assert arm.truncated == before + 1

    class Request:
        args = ("the pilot", {"do_sample": True, "temperature": 0.7, "until": ["."]})

    with pytest.raises(Unsupported, match="do_sample: false"):
        arm.generate_until([Request()])


def plan(tasks: Path, **more: Any) -> TaskPlan:
    return TaskPlan(tasks=(str(tasks / "choose.yaml"), str(tasks / "say.yaml")), **more)


def judged(tasks: Path, target: Any, reference: Any, *thresholds: str) -> dict[str, run.TaskResult]:
    ours, theirs = (run.evaluate(arm, plan(tasks)) for arm in (target, reference))
    limits = [threshold(text) for text in thresholds]
    return {
        name: run.judge(name, ours[name], theirs[name], limits, encode=reference.tok_encode, about={})
        for name in ("choose", "say")
    }


def test_a_model_against_itself_and_against_another(arm: Any, tasks: Path, tiny: Callable[..., Path]) -> None:
    from pilotage.accuracy.tasks.lm import HFTaskLM

    same = judged(tasks, arm, arm, "choose=0.99", "choose/acc_norm=0.0")
    choose = same["choose"]
    assert list(choose.metrics) == ["acc", "acc_norm"]
    assert choose.metrics["acc"].n == 40 and choose.metrics["acc"].difference == 0
    assert not choose.differing() and run.deviating(list(same.values()), 4) == []
    paired_verdict, minimum, other = choose.verdicts
    assert minimum.status is Status.FAIL and minimum.estimate == choose.metrics["acc"].target
    assert other.status is Status.PASS and other.metric == "acc_norm"
    assert paired_verdict.estimate == 0

    changed = HFTaskLM(hf.load(tiny("qwen3", seed=5), torch.float32), arm.tokenizer, 64)
    found = judged(tasks, changed, arm)
    differing = found["choose"].differing()
    assert differing and found["choose"].metrics["acc"].better + found["choose"].metrics["acc"].worse == len(differing)
    prompts = run.deviating(list(found.values()), 3)
    assert len(prompts) == 3
    # The prompt of level 2 is the request that deviates most, with its continuation.
    assert prompts[0] == differing[0].prompt
    text = arm.tokenizer.decode(prompts[0], skip_special_tokens=True)
    assert " is a" in text and text.split(" is a ")[1] in WORDS
    as_json = json.loads(json.dumps(found["choose"].to_json()))
    assert as_json["deviating"][0]["prompt_tokens"] == prompts[0]
    with pytest.raises(BadInput, match="no metric 'f1'"):
        judged(tasks, arm, arm, "choose/f1=0.5")
