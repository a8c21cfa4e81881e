"""What level 1 runs and what the user demands of it; no lm-eval, no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pilotage.core.errors import BadInput

Through = Literal["server", "engine"]
# The task that ships with pilotage; see data/.
OWN_TASK = "pilotage_capitals"
_THRESHOLD = re.compile(r"(?P<task>[^=]+)=(?P<value>[0-9.]+%?)(?:\+-(?P<tolerance>[0-9.]+%?))?")


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """A score that the user demands.

    Attributes:
        task: its name. metric: one of its metrics; None for each that the task counts.
        value: the least score, or the mean of a range.
        tolerance: half of the range; None where `value` is a minimum.
    """

    task: str
    metric: str | None
    value: float
    tolerance: float | None

    @property
    def source(self) -> str:
        return "minimum set by the user" if self.tolerance is None else "mean and tolerance set by the user"


def threshold(text: str) -> Threshold:
    """Read `TASK[/METRIC]=MINIMUM` or `TASK[/METRIC]=MEAN+-TOLERANCE`; shares or percentages.

    Raises:
        BadInput: it is neither.
    """
    found = _THRESHOLD.fullmatch(text.replace(" ", "").replace("±", "+-"))
    try:
        if found is None:
            raise ValueError(text)
        task, _, metric = found["task"].partition("/")
        value = _number(found["value"])
        tolerance = _number(found["tolerance"]) if found["tolerance"] else None
    except ValueError as error:
        raise BadInput(
            f"{text!r} is no threshold", where="--threshold", do="write TASK=0.42, TASK/METRIC=0.42 or TASK=0.45+-0.03"
        ) from error
    return Threshold(task=task, metric=metric or None, value=value, tolerance=tolerance)


def _number(text: str) -> float:
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


@dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """What level 1 runs.

    Attributes:
        tasks: lm-eval task names, and paths of task files or of directories of them.
        thresholds: the user's.
        limit: items of each task; None for all.
        num_fewshot: examples before each item; None for the task's own number.
        through: reach the target through `vllm serve`, or through an engine in this process.
        dtype: that the target serves in. The reference computes in fp32.
        hand_on: how many deviating prompts level 2 gets.
        max_length: tokens of the longest request; None for what the other commands serve with. Longer prompts lose
            their beginning.
    """

    tasks: Sequence[str] = (OWN_TASK,)
    thresholds: Sequence[Threshold] = ()
    limit: int | None = None
    num_fewshot: int | None = None
    through: Through = "server"
    dtype: str = "bfloat16"
    hand_on: int = 4
    max_length: int | None = None
