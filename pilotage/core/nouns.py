"""The nouns that travel between packages. `ArchSpec` lives in `arch.spec`, `WeightMap` in `weights.map`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class TensorKey(NamedTuple):
    """The one address of a tensor row: who produced it, for which request and position, where in the model.

    Attributes:
        arm: what produced it, e.g. "target", "hf_fp32".
        request: index of the prompt in the run, or the engine's request id.
        position: absolute position of the token in its request, from 0.
        module: Hugging Face module name, e.g. "model.layers.0.self_attn".
        site: "input", "output" or a named inner tap, e.g. "q_rope".
    """

    arm: str
    request: str
    position: int
    module: str
    site: str


class Status(enum.StrEnum):
    """What a check concluded. `not_measured` is never green."""

    PASS = "pass"
    FAIL = "fail"
    NOT_MEASURED = "not_measured"

    @property
    def exit_code(self) -> int:
        return {"pass": 0, "fail": 1, "not_measured": 2}[self.value]


def worst(statuses: list[Status]) -> Status:
    """Combine statuses: any fail is a fail, else any not_measured (or nothing at all) is not_measured."""
    if Status.FAIL in statuses:
        return Status.FAIL
    if not statuses or Status.NOT_MEASURED in statuses:
        return Status.NOT_MEASURED
    return Status.PASS


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One judged claim.

    Attributes:
        claim: the sentence that is true if the status is pass.
        metric: name of the statistic that decided, e.g. "rms_ratio".
        estimate: its value; None when it could not be measured.
        interval: its confidence interval (low, high), or None where the metric has none.
        bound: the value it was held against.
        bound_source: where the bound came from, in words.
        n: number of independent units (tokens, rows) behind the estimate.
        status: pass, fail or not_measured.
        evidence: numbers and names that let a reader check the verdict; JSON-serialisable.
    """

    claim: str
    metric: str
    estimate: float | None
    bound: float | None
    bound_source: str
    n: int
    status: Status
    interval: tuple[float, float] | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "claim": self.claim,
            "metric": self.metric,
            "estimate": self.estimate,
            "interval": list(self.interval) if self.interval else None,
            "bound": self.bound,
            "bound_source": self.bound_source,
            "n": self.n,
            "status": self.status.value,
            "evidence": dict(self.evidence),
        }


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What an arm produced for a set of token streams.

    Attributes:
        arm: name of the arm.
        dtype: the arm's compute dtype, e.g. "bfloat16".
        logits: for each stream an array-like [positions, V] of raw logits in fp32.
        positions: for each stream the absolute positions its logit rows belong to; row for position p predicts p + 1.
        taps: other tensors, by key.
        receipt: which implementation of each operator ran, and how often.
        kv: for each stream what each layer had cached after its last step (`accuracy.arms.base.LayerKV`); empty where
            it was not asked for.
    """

    arm: str
    dtype: str
    logits: list[Any]
    positions: list[list[int]]
    taps: Mapping[TensorKey, Any] = field(default_factory=dict)
    receipt: Mapping[str, Any] = field(default_factory=dict)
    kv: list[list[Any]] = field(default_factory=list)
