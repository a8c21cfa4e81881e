"""Run tasks on the reference and on the target, pair the items, judge, and pick what level 2 should look at."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pilotage.accuracy import gates, level_gates
from pilotage.accuracy.arms import hf
from pilotage.accuracy.comparison import finite
from pilotage.accuracy.tasks import kept, load, paired
from pilotage.accuracy.tasks.plan import TaskPlan, Threshold
from pilotage.core.errors import BadInput, PilotageError, Unavailable, Unsupported
from pilotage.core.nouns import Status, Verdict, worst

if TYPE_CHECKING:
    from pilotage.accuracy.tasks.lm import TaskLM

SEED = 1234
# What a metric that is not one number an item says is left to lm-eval's aggregation.
_NOT_SCORES = {"bypass"}


@dataclass(frozen=True, kw_only=True)
class Item:
    """One item of a task on both models.

    Attributes:
        doc_id: its number. filter: lm-eval's filter.
        target, reference: metric -> score.
        deviation: how far apart the answers are beyond their scores: the largest difference of a log-probability, or
            1 for another text.
        prompt: tokens for level 2: the context, and of a choice the one whose log-probability differs most.
    """

    doc_id: int
    target: dict[str, float]
    reference: dict[str, float]
    deviation: float
    prompt: list[int]


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """One task on both models.

    Attributes:
        task: its name.
        verdicts: the paired test, and the user's thresholds.
        metrics: metric -> the paired comparison; the first is the one that the verdict is about.
        items: all of them; empty where the task could not be run.
        about: how it was run.
    """

    task: str
    verdicts: list[Verdict]
    metrics: dict[str, paired.Paired] = field(default_factory=dict)
    items: list[Item] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> Status:
        return worst([verdict.status for verdict in self.verdicts])

    @property
    def primary(self) -> str | None:
        return next(iter(self.metrics), None)

    def differing(self) -> list[Item]:
        """Items whose score differs, the most deviating first."""
        metric = self.primary
        if metric is None:
            return []
        found = [item for item in self.items if item.target[metric] != item.reference[metric]]
        return sorted(found, key=lambda item: -item.deviation)

    def to_json(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "status": self.status.value,
            "metric": self.primary,
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
            "metrics": {
                name: {
                    "n": found.n,
                    "target": finite(found.target),
                    "reference": finite(found.reference),
                    "difference": finite(found.difference),
                    "interval": [finite(end) for end in found.interval],
                    "p_value": found.p_value,
                    "better": found.better,
                    "worse": found.worse,
                    "test": found.test,
                }
                for name, found in self.metrics.items()
            },
            "deviating": [
                {
                    "doc_id": item.doc_id,
                    "target": item.target,
                    "reference": item.reference,
                    "deviation": finite(item.deviation),
                    "prompt_tokens": item.prompt,
                }
                for item in self.differing()[:16]
            ],
            "about": self.about,
        }


def run(path: Path, reference: Path, plan: TaskPlan, *, eager: bool = False) -> list[TaskResult]:
    """Run a plan's tasks on Hugging Face in fp32 and on the served model.

    A task whose data cannot be had is not measured, and the others run.

    Args:
        path: checkpoint that is served.
        reference: checkpoint that Hugging Face computes.
        plan: what to run.
        eager: do not compile the target's graphs.

    Raises:
        PilotageError: a task does not exist, or an arm cannot be started.
    """
    load.require()
    names, missing = _available(plan.tasks)
    known = {task for found in names.values() for task in found}
    for threshold in plan.thresholds:
        if threshold.task not in known and threshold.task not in {result.task for result in missing}:
            raise BadInput(
                f"no task {threshold.task!r} is run", where="--threshold", do=f"use one of {', '.join(sorted(known))}"
            )
    if not names:
        return missing
    from transformers import AutoTokenizer

    loader: Any = AutoTokenizer
    with hf.quiet():
        tokenizer = loader.from_pretrained(reference)
    length = plan.max_length or _max_length(path)

    def ask() -> kept.Found:
        from pilotage.accuracy.tasks.lm import HFTaskLM

        arm = HFTaskLM(hf.load(reference, torch.float32), tokenizer, length - 1)
        return evaluate(arm, plan)

    expected = kept.answers(reference, plan, list(names), length, ask)
    gc.collect()
    with target(path, tokenizer, length, plan, eager=eager) as served:
        found = evaluate(served, plan)
        about = {
            "target": f"{served.name}, {plan.dtype}",
            "reference": "Hugging Face, float32",
            "limit": plan.limit,
            "truncated_prompts": served.truncated,
        }
        results = [
            judge(name, found[name], expected[name], plan.thresholds, encode=served.tok_encode, about=about)
            for name in expected
        ]
    return [*results, *missing]


def _available(tasks: Sequence[str]) -> tuple[dict[str, list[str]], list[TaskResult]]:
    """Load every task once; returns the names behind each that can be had, and results of those that cannot."""
    names: dict[str, list[str]] = {}
    missing: list[TaskResult] = []
    for name in tasks:
        try:
            names[name] = list(load.load(name))
        except Unavailable as error:
            verdict = gates.single(Status.NOT_MEASURED, f"{name}: runs on both models", "items", str(error))
            missing.append(TaskResult(task=name, verdicts=[verdict]))
    return names, missing


def _max_length(path: Path) -> int:
    from pilotage.serving import settings

    return int(settings.shared(path)["max_model_len"])


@contextlib.contextmanager
def target(path: Path, tokenizer: Any, length: int, plan: TaskPlan, *, eager: bool) -> Iterator[TaskLM]:
    """Yield the served model as lm-eval sees it: a server in its own process, or an engine in this one."""
    from pilotage.accuracy.tasks.lm import EngineTaskLM, ServerTaskLM
    from pilotage.serving import launch, settings

    options: dict[str, Any] = {
        **settings.shared(path, plan.dtype),
        "max_model_len": length,
        "enforce_eager": eager,
    }
    if plan.through == "engine":
        with launch.engine(path, **options) as llm:
            yield EngineTaskLM(llm, tokenizer, length)
    elif plan.through == "server":
        with launch.server(path, **options) as server:
            yield ServerTaskLM(server.url, server.model, tokenizer, length)
    else:
        raise BadInput(f"{plan.through!r} is no way to the target", where="--through", do="use server or engine")


def evaluate(arm: TaskLM, plan: TaskPlan) -> dict[str, dict[str, Any]]:
    """Run the tasks of a plan that can be had on one arm.

    Returns:
        For each task {"samples", "metrics", "higher_is_better"}: lm-eval's samples, its metrics in the task's order.
    """
    from lm_eval import evaluator

    found: dict[str, dict[str, Any]] = {}
    for name in plan.tasks:
        with contextlib.suppress(Unavailable), load.quiet():
            tasks = load.load(name)
            for task in tasks.values():
                own = task.get_config("num_fewshot")
                if plan.num_fewshot is not None and own != 0:  # a task that states 0 wants none
                    task.set_config(key="num_fewshot", value=plan.num_fewshot)
                elif own is None:
                    task.set_config(key="num_fewshot", value=0)
                task.set_fewshot_seed(seed=SEED)
            everything: Any = {"tasks": tasks, "groups": {}, "group_map": {}}
            try:
                answer: Any = evaluator.evaluate(
                    lm=arm, task_dict=everything, limit=plan.limit, bootstrap_iters=0, log_samples=True
                )
            except ValueError as error:  # a task that runs code, or wants images
                raise Unsupported(f"lm-eval refuses it: {error}", where=name) from error
            for task_name, task in tasks.items():
                listed = [str(entry["metric"]) for entry in task.config.metric_list or []]
                found[task_name] = {"samples": answer["samples"][task_name], "metrics": listed}
    return found


def judge(
    task: str,
    target: dict[str, Any],
    reference: dict[str, Any],
    thresholds: Sequence[Threshold],
    *,
    encode: Any,
    about: dict[str, Any],
) -> TaskResult:
    """Pair the items of one task and judge them.

    Raises:
        PilotageError: the two arms were given other items.
    """
    items = _items(task, target["samples"], reference["samples"], encode)
    names = [name for name in dict.fromkeys([*target["metrics"], *(items[0].target if items else [])])]
    metrics: dict[str, paired.Paired] = {}
    for metric in names:
        both = [(item.target[metric], item.reference[metric]) for item in items if metric in item.target]
        if both and not any(math.isnan(a) or math.isnan(b) for a, b in both):
            metrics[metric] = paired.compare([a for a, _ in both], [b for _, b in both])
    if not metrics:
        why = "no metric of this task is a number for every item"
        return TaskResult(
            task=task,
            verdicts=[gates.single(Status.NOT_MEASURED, f"{task}: scores are paired", "items", why, n=len(items))],
            items=items,
            about=about,
        )
    first = next(iter(metrics))
    found = metrics[first]
    verdicts = [
        level_gates.paired(
            found.difference,
            found.interval,
            found.p_value,
            found.n,
            task=task,
            metric=first,
            target=found.target,
            reference=found.reference,
            better=found.better,
            worse=found.worse,
            test=found.test,
        )
    ]
    for threshold in thresholds:
        if threshold.task != task:
            continue
        metric = threshold.metric or first
        if metric not in metrics:
            raise BadInput(f"{task} has no metric {metric!r}", where="--threshold", do=f"use {', '.join(metrics)}")
        score, n = metrics[metric].target, metrics[metric].n
        tolerance = threshold.tolerance
        verdicts.append(
            level_gates.threshold(
                score,
                paired.wilson(score, n),
                n,
                task=task,
                metric=metric,
                low=threshold.value if tolerance is None else threshold.value - tolerance,
                high=None if tolerance is None else threshold.value + tolerance,
                source=threshold.source,
            )
        )
    return TaskResult(task=task, verdicts=verdicts, metrics=metrics, items=items, about=about)


def _items(task: str, ours: Sequence[Any], theirs: Sequence[Any], encode: Any) -> list[Item]:
    first = {sample["filter"]: None for sample in theirs}
    keep = next(iter(first), None)
    ours, theirs = ([sample for sample in samples if sample["filter"] == keep] for samples in (ours, theirs))
    by_doc = {sample["doc_id"]: sample for sample in ours}
    items = []
    for sample in theirs:
        other = by_doc.get(sample["doc_id"])
        if other is None or other["doc_hash"] != sample["doc_hash"] or other["prompt_hash"] != sample["prompt_hash"]:
            raise PilotageError(f"item {sample['doc_id']} is not the same for both models", where=task)
        deviation, prompt = _deviation(other, sample, encode)
        items.append(
            Item(
                doc_id=int(sample["doc_id"]),
                target=_scores(other),
                reference=_scores(sample),
                deviation=deviation,
                prompt=prompt,
            )
        )
    if len(by_doc) != len(items):
        raise PilotageError(f"{len(by_doc)} items against {len(items)}", where=task)
    return items


def _scores(sample: Any) -> dict[str, float]:
    return {
        name: float(sample[name])
        for name in sample["metrics"]
        if name not in _NOT_SCORES and isinstance(sample[name], int | float)
    }


def _deviation(ours: Any, theirs: Any, encode: Any) -> tuple[float, list[int]]:
    """Return how far apart the raw answers of an item are, and the tokens of the request that is furthest."""
    apart: list[float] = []
    for a, b in zip(ours["resps"], theirs["resps"], strict=True):
        x, y = _first(a), _first(b)
        if isinstance(x, tuple | list):  # (log-probability, greedy)
            apart.append(abs(float(x[0]) - float(y[0])))
        elif isinstance(x, float):
            apart.append(abs(x - float(y)))
        else:
            apart.append(float(x != y))
    worst_one = max(range(len(apart)), key=apart.__getitem__)
    arguments = theirs["arguments"][worst_one]
    text = "".join(part for part in arguments if isinstance(part, str))
    return apart[worst_one], encode(text)


def _first(answers: Any) -> Any:
    """One request has a list of answers, one a repeat."""
    while isinstance(answers, list) and answers and not isinstance(answers[0], float | int | str):
        answers = answers[0]
    if isinstance(answers, list) and answers and isinstance(answers[0], str):
        return answers[0]
    return answers


def deviating(results: Sequence[TaskResult], count: int) -> list[list[int]]:
    """Return the prompts that level 2 should look at: of each task in turn the item that deviates most.

    Items whose score differs come first; where there are none, those whose answers are furthest apart.
    """
    queues = []
    for result in results:
        differing = result.differing()
        rest = sorted(
            (item for item in result.items if item not in differing and item.deviation > 0),
            key=lambda item: -item.deviation,
        )
        queues.append([*differing, *rest])
    found: list[list[int]] = []
    while len(found) < count and any(queues):
        for queue in queues:
            if queue and len(found) < count:
                prompt = queue.pop(0).prompt
                if prompt not in found:
                    found.append(prompt)
    return found
