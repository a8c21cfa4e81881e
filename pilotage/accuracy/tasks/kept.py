"""The reference's answers, kept: they cost as much as the target's and only change with what they depend on."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pilotage.accuracy import controls
from pilotage.accuracy.tasks import load
from pilotage.accuracy.tasks.plan import TaskPlan
from pilotage.core import store

# Part of the key: change it with anything that changes what the reference answers or what is kept of it.
RECIPE = 1
_KEYS = ("doc_id", "doc_hash", "prompt_hash", "filter", "metrics", "resps", "arguments")

Found = dict[str, dict[str, Any]]


def answers(reference: Path, plan: TaskPlan, names: list[str], length: int, ask: Callable[[], Found]) -> Found:
    """Return the reference's answers from the cache, or ask for them and keep them.

    Args:
        reference: its checkpoint.
        plan: what is run.
        names: names of the plan's tasks that can be had.
        length: longest prompt.
        ask: runs the reference.
    """
    versions = [importlib.metadata.version(name) for name in ("torch", "transformers", "lm_eval")]
    key: list[Any] = [RECIPE, controls.digest(reference), plan.limit, plan.num_fewshot, length, versions]
    key += [torch.get_num_threads(), [_about(name) for name in names]]
    path = store.keyed("tasks", key)

    def read(value: Any) -> Found:
        if not all(isinstance(found["samples"], list) for found in value.values()):
            raise TypeError("samples are no list")
        answers: Found = value
        return answers

    if (kept := store.kept(path, read)) is not None:
        return kept
    found = {
        task: {"metrics": answer["metrics"], "samples": [_slim(sample) for sample in answer["samples"]]}
        for task, answer in ask().items()
    }
    store.write_json(path, found)
    return found


def _about(name: str) -> list[Any]:
    """What a task's requests and scores depend on: its definition and its documents."""
    about: list[Any] = []
    for task_name, task in load.load(name).items():
        documents = hashlib.sha256()
        for document in task.eval_docs:
            documents.update(json.dumps(document, sort_keys=True, default=str).encode())
        about.append([task_name, task.dump_config(), documents.hexdigest()])
    return about


def _slim(sample: Any) -> dict[str, Any]:
    """Keep of one of lm-eval's samples what pairing needs, as JSON gives it back."""
    kept = {key: sample[key] for key in (*_KEYS, *sample["metrics"])}
    return json.loads(json.dumps(kept, default=str))
