"""The ledger: what became of every checkpoint tensor, what wrote every parameter, and whether the way back is exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pilotage.core.errors import WeightError
from pilotage.core.nouns import Status, Verdict, worst
from pilotage.core.progress import track
from pilotage.weights.checkpoint import SafetensorsCheckpoint
from pilotage.weights.lazy import LazyTensor
from pilotage.weights.map import Plan, Problem, Step, WeightMap, same_bytes
from pilotage.weights.reading import dtype_problem


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One checkpoint tensor. `action` is "load", "drop" or, when it fits nowhere, "error"."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    action: str
    targets: tuple[str, ...]
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class ParameterEntry:
    """One parameter of the model, with the checkpoint tensors it is made of."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RoundTrip:
    """Whether HF -> parameters -> HF gives the same bytes. `compared` counts checkpoint tensors."""

    status: Status
    compared: int = 0
    differing: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The account of one checkpoint against one model.

    Attributes:
        model: where the checkpoint is.
        tensors: every checkpoint tensor.
        parameters: every parameter.
        problems: what does not fit.
        round_trip: of the bytes.
    """

    model: str
    tensors: tuple[TensorEntry, ...]
    parameters: tuple[ParameterEntry, ...]
    problems: tuple[Problem, ...]
    round_trip: RoundTrip

    @property
    def status(self) -> Status:
        """The worst of the verdicts."""
        return worst([verdict.status for verdict in self.verdicts()])

    def counts(self) -> dict[str, int]:
        """Return how many tensors were loaded and dropped, parameters written, and bytes."""
        actions = Counter(entry.action for entry in self.tensors)
        return {
            "tensors": len(self.tensors),
            "loaded": actions["load"],
            "dropped": actions["drop"],
            "errors": len(self.problems),
            "parameters": len(self.parameters),
            "written_once": sum(bool(entry.sources) for entry in self.parameters) - self._count("double"),
            "bytes": sum(entry.bytes for entry in self.tensors),
        }

    def verdicts(self) -> list[Verdict]:
        """Judge the three claims: consumed once, written once, and the same bytes on the way back."""
        tensors = {entry.key for entry in self.tensors}
        on_tensors = [problem for problem in self.problems if problem.name in tensors]
        on_parameters = [problem for problem in self.problems if problem.name not in tensors]
        trip = self.round_trip
        return [
            _verdict(
                "Every checkpoint tensor is consumed exactly once, or dropped with a declared reason.",
                "tensors_in_error",
                on_tensors,
                len(self.tensors),
            ),
            _verdict(
                "Every parameter is written exactly once, in its shape and dtype.",
                "parameters_in_error",
                on_parameters,
                len(self.parameters),
            ),
            Verdict(
                claim="HF -> parameters -> HF gives the same bytes.",
                metric="tensors_differing",
                estimate=None if trip.status is Status.NOT_MEASURED else float(len(trip.differing)),
                bound=0.0,
                bound_source="moving values is exact",
                n=trip.compared,
                status=trip.status,
                evidence={"differing": list(trip.differing)},
            ),
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the ledger as JSON data."""
        return {
            "model": self.model,
            "status": self.status.value,
            "tensors": [
                {
                    "key": entry.key,
                    "shape": list(entry.shape),
                    "dtype": entry.dtype,
                    "bytes": entry.bytes,
                    "action": entry.action,
                    "targets": list(entry.targets),
                    "reason": entry.reason,
                }
                for entry in self.tensors
            ],
            "parameters": [
                {"name": entry.name, "shape": list(entry.shape), "sources": list(entry.sources)}
                for entry in self.parameters
            ],
            "counts": self.counts(),
            "round_trip": {
                "status": self.round_trip.status.value,
                "compared": self.round_trip.compared,
                "differing": list(self.round_trip.differing),
            },
            "problems": [{"kind": p.kind, "name": p.name, "text": p.text} for p in self.problems],
            "verdicts": [verdict.to_json() for verdict in self.verdicts()],
        }

    def _count(self, kind: str) -> int:
        names = {entry.name for entry in self.parameters}
        return sum(problem.kind == kind and problem.name in names for problem in self.problems)


def ledger(model_path: str | Path, weight_map: WeightMap, model: nn.Module) -> Ledger:
    """Account for every tensor of a checkpoint, reading all of it once for the round trip.

    Args:
        model_path: the checkpoint's directory.
        weight_map: of the model's package.
        model: built for one rank (not sharded), usually on the meta device; only names, shapes and dtypes are used.

    Raises:
        BadInput: the checkpoint cannot be read; that it does not fit the model is in the result, not an error.
    """
    checkpoint = SafetensorsCheckpoint(model_path)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    plan = weight_map.plan(checkpoint.keys(), parameters)
    problems = [*plan.problems, *fit_problems(plan, checkpoint, parameters)]
    problems += copy_problems(plan, checkpoint)
    trip = _round_trip(weight_map, plan, checkpoint)
    return account(str(model_path), plan, checkpoint, parameters, problems, trip)


def account(
    model: str,
    plan: Plan,
    checkpoint: SafetensorsCheckpoint,
    parameters: Mapping[str, Tensor],
    problems: Sequence[Problem],
    trip: RoundTrip,
) -> Ledger:
    """Lay out a plan as a ledger."""
    targets: dict[str, list[str]] = {}
    sources: dict[str, list[str]] = {}
    for step in plan.steps:
        for key in step.hf:
            targets.setdefault(key, []).extend(step.native)
        for native in step.native:
            sources.setdefault(native, []).extend(step.hf)
    for native, key in plan.ties.items():
        targets.setdefault(key, []).append(native)
        sources.setdefault(native, []).append(key)
    texts = {problem.name: problem.text for problem in reversed(problems)}
    tensors = []
    for key, tensor in checkpoint.tensors.items():
        action = "drop" if key in plan.drops else "load" if key in targets else "error"
        reason = plan.drops.get(key)
        if key in texts:
            action, reason = "error", texts[key]
        tensors.append(
            TensorEntry(
                key=key,
                shape=tensor.shape,
                dtype=tensor.dtype_name,
                bytes=tensor.nbytes,
                action=action,
                targets=tuple(targets.get(key, ())),
                reason=reason,
            )
        )
    return Ledger(
        model=model,
        tensors=tuple(tensors),
        parameters=tuple(
            ParameterEntry(name=name, shape=tuple(parameter.shape), sources=tuple(sources.get(name, ())))
            for name, parameter in parameters.items()
        ),
        problems=tuple(problems),
        round_trip=trip,
    )


def fit_problems(plan: Plan, checkpoint: SafetensorsCheckpoint, parameters: Mapping[str, Tensor]) -> list[Problem]:
    """Compare shapes and dtypes of an unsharded model with what the rules give; reads headers only."""
    problems = []
    for step in plan.steps:
        sources = [checkpoint[key] for key in step.hf]
        made, failure = _shapes(step, sources)
        if failure is not None:
            problems.append(failure)
            continue
        for native, shape in zip(step.native, made, strict=True):
            if native in parameters:
                # A rule that computes takes other dtypes than the parameter's, and checks them itself.
                plain = [] if getattr(step.rule, "dequantises", False) else sources
                problems += _fit(step.hf[0], plain, native, shape, parameters[native])
    for native, key in plan.ties.items():
        problems += _fit(key, [checkpoint[key]], native, checkpoint[key].shape, parameters[native])
    return problems


def copy_problems(plan: Plan, checkpoint: SafetensorsCheckpoint) -> list[Problem]:
    """Compare the bytes of tensors that must repeat a tied one."""
    return [
        Problem("tie", name, f"must repeat the tied {source}, and holds other values")
        for name, source in plan.copies.items()
        if source in checkpoint and not same_bytes(checkpoint[name][:], checkpoint[source][:])
    ]


def _shapes(step: Step, sources: Sequence[LazyTensor]) -> tuple[list[tuple[int, ...]], Problem | None]:
    try:
        made = step.rule.to_native([torch.empty(source.shape, device="meta") for source in sources])
    except WeightError as error:
        return [], Problem("shape", step.hf[0], error.what)
    return [tuple(tensor.shape) for tensor in made], None


def _fit(
    key: str, sources: Iterable[LazyTensor], native: str, shape: tuple[int, ...], parameter: Tensor
) -> list[Problem]:
    problems = []
    if shape != tuple(parameter.shape):
        text = f"gives {list(shape)}, parameter {native} is {list(parameter.shape)}"
        problems.append(Problem("shape", key, text))
    for source in sources:
        text_or_none = dtype_problem(parameter.dtype, source)
        if text_or_none is not None:
            problems.append(Problem("dtype", source.name, f"{text_or_none} ({native})"))
    return problems


def _round_trip(weight_map: WeightMap, plan: Plan, checkpoint: SafetensorsCheckpoint) -> RoundTrip:
    """Take each step's tensors to parameters and back, one step at a time."""
    if not plan.steps:
        return RoundTrip(status=Status.NOT_MEASURED)
    compared, differing = 0, []
    for step in track(plan.steps, "proving the weight map"):
        originals = {key: checkpoint[key][:] for key in step.hf}
        try:
            # Through the map's own two directions, by name: a rule that is found on one side only is caught as well.
            native = dict(zip(step.native, step.rule.to_native(list(originals.values())), strict=True))
            back = weight_map.to_hf(native)
        except WeightError:
            back = {}
        compared += len(originals)
        differing += [key for key, tensor in originals.items() if key not in back or not same_bytes(back[key], tensor)]
        differing += [key for key in back if key not in originals]
    return RoundTrip(
        status=Status.FAIL if differing else Status.PASS, compared=compared, differing=tuple(dict.fromkeys(differing))
    )


def _verdict(claim: str, metric: str, problems: Sequence[Problem], n: int) -> Verdict:
    status = Status.FAIL if problems else Status.PASS if n else Status.NOT_MEASURED
    return Verdict(
        claim=claim,
        metric=metric,
        estimate=float(len(problems)),
        bound=0.0,
        bound_source="a checkpoint fits or it does not",
        n=n,
        status=status,
        evidence={"problems": [{"kind": p.kind, "name": p.name, "text": p.text} for p in problems]},
    )
