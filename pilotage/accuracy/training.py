"""Does the training face compute what Hugging Face does? What `pilotage validate --train` does, in order.

Forward, loss and the gradient of every parameter by itself: a gradient path that is lost leaves the loss and the norm
of all gradients nearly as they were, and shows in one parameter alone. fp32 is held against Hugging Face under its
other attention implementation, bf16 against Hugging Face in bf16, both measured from Hugging Face in fp32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pilotage.accuracy import gates, training_cases
from pilotage.accuracy.arms import hf
from pilotage.accuracy.arms.base import require_known
from pilotage.accuracy.training_cases import Case, Step
from pilotage.accuracy.training_checkpoints import checkpoint_verdicts
from pilotage.accuracy.validate import ARMS, Clock, versions
from pilotage.arch import source
from pilotage.arch.spec import ArchSpec
from pilotage.core.nouns import Status, Verdict, worst
from pilotage.core.progress import track
from pilotage.models import registry

JUDGED_AT_ONCE = 1 << 24  # elements
LOSS_SLACK = 3.0
SHOWN = 5  # gradients that fail, one verdict each
_SINGLE = ("worst_row", "worst_element")
# Rescaling is a mean over rows. Of the one row of a norm's gradient it is where its rounding happens to point.
GAIN_ROWS = 8
_LAYER = re.compile(r"\.\d+\.")


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """One case in one dtype.

    Attributes:
        arm: the dtype.
        case: its name.
        verdicts: of logits, loss and, worst first, gradients that did not pass; one for all gradients.
        parameters: for each parameter its relative L2 error, the baseline's, and the status.
    """

    arm: str
    case: str
    verdicts: list[Verdict]
    parameters: list[dict[str, Any]] = field(default_factory=list)

    @property
    def status(self) -> Status:
        """The worst of the verdicts."""
        return worst([verdict.status for verdict in self.verdicts])

    def to_json(self) -> dict[str, Any]:
        """The result as JSON."""
        return {
            "arm": self.arm,
            "case": self.case,
            "status": self.status.value,
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
            "parameters": self.parameters,
        }


@dataclass(frozen=True, kw_only=True)
class TrainingValidation:
    """Everything that was found.

    Attributes:
        model: as the user named it.
        training_class: "module.Class" that trains it.
        cases: by dtype and case.
        verdicts: of checkpoints.
        seconds: time of each part.
        command: how to do it again.
    """

    model: str
    training_class: str
    cases: list[CaseResult]
    verdicts: list[Verdict]
    command: str
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def status(self) -> Status:
        """The worst of everything."""
        return worst([*(case.status for case in self.cases), *(verdict.status for verdict in self.verdicts)])

    def to_json(self) -> dict[str, Any]:
        """The result as JSON."""
        return {
            "model": self.model,
            "training_class": self.training_class,
            "status": self.status.value,
            "cases": [case.to_json() for case in self.cases],
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
            "seconds": {name: round(value, 2) for name, value in self.seconds.items()},
            "versions": versions(),
            "command": self.command,
        }


def validate_training(
    model: str,
    *,
    arms: Sequence[str] = ARMS,
    compiled: bool = True,
    training_class: Any = None,
    command: str = "",
) -> TrainingValidation:
    """Compare the training face of a model with Hugging Face's own class.

    Args:
        model: MODEL of the command line.
        arms: dtypes.
        compiled: run the case under `torch.compile` as well.
        training_class: to be judged instead of the registered one; has `from_pretrained`, `save_pretrained`.
        command: the command line, for the report.

    Raises:
        PilotageError: something is missing or cannot be used.
    """
    require_known(arms, ARMS)
    clock = Clock()
    path = source.resolve(model)
    config = source.load_config(str(path))
    cls = training_class or registry.training_class(config.architectures or [])
    spec = ArchSpec.from_hf(config)
    cases = training_cases.cases(spec, config.get_text_config().pad_token_id, compiled=compiled)
    routed, batches = bool(spec.num_experts), _batches(cases)
    truth = training_cases.hugging_face(path, torch.float32, "sdpa")
    # The other attention: where Hugging Face's sdpa would not do, the truth is eager already and there is none.
    baselines = {
        arm: training_cases.hugging_face(path, getattr(torch, arm), "eager" if arm == "float32" else "sdpa")
        for arm in arms
    }
    faces = {arm: training_cases.ours(cls, path, getattr(torch, arm), _attention(path)) for arm in arms}
    clock("load")
    noise: dict[str, dict[str, float]] = {arm: {} for arm in arms}
    if routed:
        noise |= {arm: _noise(truth, baselines[arm], batches) for arm in arms if arm != "float32"}
        clock("noise of experts")
    results: list[CaseResult] = []
    # Batch by batch: logits and gradients of one are as large as the model and a half.
    for batch in track(batches, "training"):
        true = training_cases.run(truth, batch[0], batch[0].theirs)
        clock("hf_float32")
        for arm in arms:
            baseline = training_cases.run(baselines[arm], batch[0], batch[0].theirs)
            clock(f"hf_{arm}_baseline")
            for case in batch:
                found = training_cases.run(faces[arm], case, case.ours)
                results.append(compare(arm, case.name, found, true, baseline, routed=routed, noise=noise[arm]))
            clock(f"ours_{arm}")
    names = [case.name for case in cases]
    results.sort(key=lambda result: (arms.index(result.arm), names.index(result.case)))
    del truth, baselines, faces
    verdicts = checkpoint_verdicts(cls, path)
    clock("checkpoints")
    return TrainingValidation(
        model=model,
        training_class=f"{cls.__module__}.{cls.__name__}",
        cases=results,
        verdicts=verdicts,
        command=command,
        seconds=clock.seconds,
    )


def _attention(path: Path) -> str:
    from transformers import AutoConfig

    return hf.attention_of(AutoConfig.from_pretrained(path), "sdpa")


def _batches(cases: Sequence[Case]) -> list[list[Case]]:
    """Put together the cases that feed the same batch."""
    found: dict[int, list[Case]] = {}
    for case in cases:
        found.setdefault(id(case.inputs), []).append(case)
    return list(found.values())


def _noise(truth: Any, baseline: Any, batches: Sequence[Sequence[Case]]) -> dict[str, float]:
    """Return the largest relative L2 error of the baseline in any batch, by parameter."""
    largest: dict[str, float] = {}
    for case, *_ in batches:
        true, other = (training_cases.run(model, case, case.theirs).gradients for model in (truth, baseline))
        for name, value in true.items():
            found = other.get(name)
            if value is not None and found is not None and float(value.norm()):
                largest[name] = max(largest.get(name, 0.0), float((found - value).norm() / value.norm()))
    return largest


def compare(
    arm: str,
    case: str,
    found: Step,
    truth: Step,
    baseline: Step,
    *,
    routed: bool = False,
    noise: Mapping[str, float] | None = None,
) -> CaseResult:
    """Judge one step of our face.

    Half precision decides near ties between experts by its rounding, and a token that takes another expert is a row far
    off in logits and gradients of any clean implementation. So for `routed` models single rows and elements are judged
    in fp32 alone; the pooled errors in both. Such tokens are few, and a batch may have one in one implementation and
    none in the other: a gradient may be as far off as the baseline's own is in any batch.

    Args:
        arm: the dtype.
        case: name of the case.
        found: ours.
        truth: Hugging Face's in fp32.
        baseline: Hugging Face's in the same dtype, or in fp32 under its other attention.
        routed: the model has experts.
        noise: largest relative L2 error of the baseline's gradients in any batch, where that is a measure too.
    """
    single_rows = not routed or arm == "float32"
    verdicts = [
        *_judge(arm, "logits", found.logits, truth.logits, baseline.logits, single_rows),
        _loss(found, truth, baseline),
    ]
    names = [*truth.gradients, *(name for name in found.gradients if name not in truth.gradients)]
    small = {} if arm == "float32" else _together(arm, found.gradients, truth.gradients, baseline.gradients)
    failed: list[tuple[float, Verdict]] = []
    parameters = []
    for name in names:
        judged, numbers = _gradient(arm, name, found.gradients, truth.gradients, baseline.gradients, single_rows)
        if name in small:
            judged = small[name]
        bound = gates.TENSOR_RATIO_BOUND * (noise or {}).get(name, 0.0)
        if numbers["relative_l2"] is not None and numbers["relative_l2"] <= bound:
            why = "the baseline's error in another batch"
            judged = [
                gates.single(Status.PASS, f"gradient of {name}", "relative_l2", why, estimate=numbers["relative_l2"])
            ]
        status = worst([verdict.status for verdict in judged])
        parameters.append({"parameter": name, **numbers, "status": status.value})
        failed += [(numbers["relative_l2"] or math.inf, v) for v in judged if v.status is not Status.PASS]
    off = [entry["parameter"] for entry in parameters if entry["status"] != Status.PASS.value]
    status = worst([Status(entry["status"]) for entry in parameters])
    largest = max(parameters, key=lambda entry: entry["relative_l2"] or 0.0, default=None)
    verdicts.append(
        Verdict(
            claim="every parameter's gradient is Hugging Face's",
            metric="parameters_off",
            estimate=float(len(off)),
            bound=0.0,
            bound_source="each parameter is judged by itself",
            n=len(parameters),
            status=status,
            evidence={"parameters": off, "largest": largest},
        )
    )
    verdicts += [verdict for _, verdict in sorted(failed, key=lambda pair: -pair[0])[:SHOWN]]
    return CaseResult(arm=arm, case=case, verdicts=verdicts, parameters=parameters)


Gradients = Mapping[str, "Tensor | None"]


def _gradient(
    arm: str, name: str, found: Gradients, truth: Gradients, baseline: Gradients, single_rows: bool
) -> tuple[list[Verdict], dict[str, Any]]:
    claim = f"gradient of {name}"
    numbers: dict[str, Any] = {"relative_l2": None, "baseline_relative_l2": None}
    ours, theirs, other = found.get(name), truth.get(name), baseline.get(name)
    if ours is None and theirs is None:
        return [gates.single(Status.PASS, f"{claim}: none on either side", "present", "neither has one")], numbers
    if ours is None or theirs is None or other is None:
        here = "Hugging Face has one and the face has none" if ours is None else "the face has one, Hugging Face none"
        return [gates.single(Status.FAIL, f"{claim}: present where it is in Hugging Face", "present", here)], numbers
    size = float(theirs.norm())
    if size:
        numbers = {
            "relative_l2": float((ours - theirs).norm()) / size,
            "baseline_relative_l2": float((other - theirs).norm()) / size,
        }
    return _judge(arm, claim, ours, theirs, other, single_rows), numbers


def _together(arm: str, found: Gradients, truth: Gradients, baseline: Gradients) -> dict[str, list[Verdict]]:
    """Judge gradients of too few elements for a ratio of two errors with their like in all layers, by name."""
    kinds: dict[str, list[str]] = {}
    for name, value in truth.items():
        there = all(side.get(name) is not None for side in (found, truth, baseline))
        if there and value is not None and value.numel() < gates.MIN_ELEMENTS and float(value.norm()):
            kinds.setdefault(_LAYER.sub(".*.", name), []).append(name)
    verdicts: dict[str, list[Verdict]] = {}
    for kind, names in kinds.items():
        # Each in units of its own size, or the layer with the largest would be all that is judged.
        ours, theirs, other = (
            torch.cat([_given(side, name).flatten() / _given(truth, name).norm() for name in names])
            for side in (found, truth, baseline)
        )
        if ours.numel() >= gates.MIN_ELEMENTS:
            judged = _judge(arm, f"gradients of {kind}", ours, theirs, other, single_rows=False)
            verdicts |= dict.fromkeys(names, judged)
    return verdicts


def _given(gradients: Gradients, name: str) -> Tensor:
    value = gradients[name]
    assert value is not None
    return value


def _judge(
    arm: str, name: str, found: Tensor, expected: Tensor, baseline: Tensor, single_rows: bool = True
) -> list[Verdict]:
    if found.shape == expected.shape == baseline.shape and expected.ndim > 1 and expected.numel() > JUDGED_AT_ONCE:
        # A judgement needs many times the tensor's memory; each block of rows has to pass by itself.
        rows = max(1, JUDGED_AT_ONCE * expected.shape[0] // expected.numel())
        blocks = zip(found.split(rows), expected.split(rows), baseline.split(rows), strict=True)
        return [
            verdict
            for number, (ours, theirs, other) in enumerate(blocks)
            for verdict in _judge(arm, f"{name}, rows from {number * rows}", ours, theirs, other, single_rows)
        ]
    if arm == "float32":
        floored = gates.floored(found, expected, baseline, name=name)
        return [verdict for verdict in floored if verdict.metric != "gain_in_floors" or verdict.n >= GAIN_ROWS]
    judged = gates.three_way(found, expected, baseline, rtol=4 * torch.finfo(torch.float32).eps, name=name)
    return judged if single_rows else [verdict for verdict in judged if verdict.metric not in _SINGLE]


def _loss(found: Step, truth: Step, baseline: Step) -> Verdict:
    error, other = abs(found.loss - truth.loss), abs(baseline.loss - truth.loss)
    # Two roundings of the dtype's logits, averaged over few tokens, may agree better than either deserves.
    bound = max(LOSS_SLACK * other, 4 * torch.finfo(torch.float32).eps * abs(truth.loss))
    if other:
        bound = max(bound, LOSS_SLACK * _logit_noise(truth, baseline))
    return Verdict(
        claim="the loss is Hugging Face's",
        metric="absolute_error",
        estimate=error if math.isfinite(error) else None,
        bound=bound,
        bound_source=f"{LOSS_SLACK:g} times the baseline's error or the standard error of its logits, or 4 eps",
        n=1,
        status=gates.by_value(error, bound),
        evidence={"loss": found.loss, "hugging_face": truth.loss, "baseline": baseline.loss},
    )


def _logit_noise(truth: Step, baseline: Step) -> float:
    error = (baseline.logits - truth.logits).pow(2).mean(-1).sqrt()
    return float(error.mean()) / math.sqrt(error.numel())
