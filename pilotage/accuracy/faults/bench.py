"""What one tiny checkpoint is judged by: the reference's rows, the baselines and the clean controls, measured once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pilotage.accuracy import comparison, controls, metrics
from pilotage.accuracy import modules as module_checks
from pilotage.accuracy.arms import hf
from pilotage.accuracy.arms.tapped import Request
from pilotage.accuracy.comparison import ArmResult, Reference
from pilotage.accuracy.faults import peers
from pilotage.accuracy.gates import ControlErrors
from pilotage.accuracy.localise.side import Known
from pilotage.core.nouns import Status

ARMS = ("bfloat16", "float32")
# Controls that go through a compiler take seconds each and say the same on models this small.
_SKIPPED = tuple(control.name for control in controls.CONTROLS if control.compiled)


@dataclass(frozen=True, kw_only=True)
class _Side:
    """Hugging Face in one dtype: its logits [rows, V], and clean controls in units of their errors."""

    baseline: Tensor
    controls: list[ControlErrors]


@dataclass
class Bench:
    """A checkpoint and everything that its targets are held against.

    Args:
        model: name of a tiny model, with its seed: "gemma3@2".

    Attributes:
        path: its directory.
        truth: the reference's tokens and fp32 logits.
        requests: the same tokens as they are fed to a target: packed, in chunks, and decoded.
        known: Hugging Face's side of `localise`, for all targets.
    """

    model: str
    path: Path = field(init=False)
    truth: Reference = field(init=False)
    requests: list[Request] = field(init=False)

    def __post_init__(self) -> None:
        from pilotage.accuracy.validate import prompt_ids
        from pilotage.arch import source
        from pilotage.arch.spec import ArchSpec

        self.path = source.resolve(f"tiny:{self.model}")
        spec = ArchSpec.from_hf(source.load_config(str(self.path)))
        self.fp32 = hf.load(self.path, torch.float32)
        ids, new_tokens = prompt_ids(self.path, spec)
        self.truth = comparison.reference(self.path, self.fp32, ids, new_tokens)
        self.requests = [
            Request(tokens=stream.tokens, parts=_parts(stream.prompt, index), kept=stream.positions)
            for index, stream in enumerate(self.truth.streams)
        ]
        self._sides: dict[str, _Side] = {}
        self.known = Known(path=self.path)

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(len(request.tokens) for request in self.requests)

    def side(self, arm: str) -> _Side:
        """Measure Hugging Face's baseline and controls of a dtype, once."""
        if arm not in self._sides:
            self._sides[arm] = self._measure(arm)
        return self._sides[arm]

    def _measure(self, arm: str) -> _Side:
        model, skip = self.fp32, [*_SKIPPED]
        if arm == "float32":
            hf.set_attention(model, "eager")
            baseline = comparison.joined(hf.HFArm(model, "baseline"), self.truth.streams)
            hf.set_attention(model, "sdpa")
            skip.append(controls.EAGER)
        else:
            model = hf.load(self.path, getattr(torch, arm))
            baseline = comparison.joined(hf.HFArm(model, "baseline"), self.truth.streams)
        errors = metrics.row_errors(baseline, self.truth.logits)
        found, _, _ = controls.cached(
            ["faults", controls.digest(self.path), arm, [list(s.tokens) for s in self.truth.streams]],
            lambda: controls.measure(
                model, self.truth.streams, self.truth.logits, errors, self.truth.phases, skip=skip
            ),
        )
        return _Side(baseline=baseline, controls=found)

    def compare(self, arm: str, rows: Tensor) -> ArmResult:
        """Judge a target's logits [rows, V] by the whole-model gates."""
        side = self.side(arm)
        return comparison.compare(self.truth, rows, side.baseline, side.controls, arm=arm)

    def peers(self, rows: Tensor) -> dict[str, bool]:
        """Ask the peers' rules about a target's logits in the serving dtype."""
        return peers.judge(rows, self.truth.logits, self.side("bfloat16").baseline)

    def failing_modules(self, arms: Sequence[str] = ARMS) -> list[str]:
        """Run the module checks on what is loaded now; returns "module (dtype)" of each that fails."""
        tokens = max(self.truth.streams, key=lambda stream: len(stream.tokens)).tokens
        found = module_checks.check(self.path, self.path, self.fp32, tokens, dtypes=arms)
        return [f"{m['module']} ({m['dtype']})" for m in found if m["verdict"]["status"] == Status.FAIL.value]


def _parts(prompt: int, index: int) -> tuple[int, ...]:
    """Feed some prompts whole and others in two and three parts, none of them of a page's size."""
    pieces = min(prompt, (1, 2, 3, 3)[index % 4])
    cuts = [0, *(round(prompt * (i + 1) / pieces) + (i % 2) for i in range(pieces - 1)), prompt]
    return tuple(b - a for a, b in itertools.pairwise(cuts) if b > a)


def failures(result: ArmResult) -> dict[str, Any]:
    """Return the verdicts of an arm that fail: metric -> [estimate, bound]."""
    return {v.metric: [v.estimate, v.bound] for v in result.verdicts if v.status is Status.FAIL}
