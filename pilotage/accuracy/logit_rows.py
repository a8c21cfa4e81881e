"""Rows of logits, or of the top of log-probabilities, against the same rows of a reference, a baseline and controls."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pilotage.accuracy import error_laws, gates, level_gates, metrics
from pilotage.accuracy.comparison import finite
from pilotage.accuracy.forcing import Found, TopLogprobs
from pilotage.accuracy.gates import ControlErrors
from pilotage.accuracy.logit_errors import logit_errors, ulp
from pilotage.core.errors import BadInput
from pilotage.core.nouns import Status, Verdict

ATOL = 1e-5
# k -> (atol, rtol); None is the whole vocabulary. The tolerances of vLLM Neuron.
TOL_MAP: dict[int | None, tuple[float, float]] = {
    5: (ATOL, 0.011),
    50: (ATOL, 0.02),
    1000: (ATOL, 0.03),
    None: (ATOL, 0.05),
}
TolMap = Mapping[int | None, float | tuple[float, float]]


class Compared:
    """Rows of a target against the same rows of the reference, of the baseline and of controls.

    Where the target is the top of its log-probabilities, all arms are compared as log-probabilities at the tokens that
    it returned: a shift taken from one arm only would look like an error.
    """

    def __init__(
        self,
        found: Sequence[Found],
        *,
        expected: Tensor,
        baseline: Tensor | None,
        controls: Sequence[Tensor],
        dtype: torch.dtype,
    ) -> None:
        self.dtype, self.expected, self.baseline, self.controls = dtype, expected, baseline, list(controls)
        self.largest = expected.abs().amax(-1).double()
        self.dense: Tensor | None = None
        self._tops: dict[int | None, tuple[Tensor, Tensor]] = {}
        if all(isinstance(part, Tensor) for part in found):
            self.dense = torch.cat([part.reshape(-1, part.shape[-1]) for part in found if isinstance(part, Tensor)])
            if self.dense.shape != expected.shape:
                raise BadInput(
                    f"a vocabulary of {self.dense.shape[-1]}; the reference has {expected.shape[-1]}",
                    where="generate_fn",
                )
            return
        tops = [part for part in found if isinstance(part, TopLogprobs)]
        if len(tops) != len(found):
            raise BadInput("some prompts have logits, others the top of them", where="generate_fn")
        width = max(part.ids.shape[-1] for part in tops)
        pads = [(part, (0, width - part.ids.shape[-1])) for part in tops]
        pad = torch.nn.functional.pad
        self.ids = torch.cat([pad(part.ids, by, value=-1).reshape(-1, width) for part, by in pads])
        if int(self.ids.amax()) >= expected.shape[-1]:
            raise BadInput(f"returned token {int(self.ids.amax())}, outside the vocabulary", where="generate_fn")
        values = torch.cat([pad(part.values.double(), by).reshape(-1, width) for part, by in pads])
        self.there = self.ids >= 0
        self.values = torch.where(self.there, values, 0.0)
        self.least = torch.cat([part.least.reshape(-1) for part in tops])

    @property
    def returned(self) -> int:
        """How many tokens of a row the target told."""
        return self.expected.shape[-1] if self.dense is not None else int(self.there.sum(-1).amin())

    def _at_returned(self, logits: Tensor) -> Tensor:
        logprobs = logits.double().log_softmax(-1).gather(-1, self.ids.clamp_min(0))
        return torch.where(self.there, logprobs, 0.0)

    def errors(self, arm: Tensor | None) -> metrics.RowErrors:
        """Errors of an arm's rows; None for the target's."""
        if self.dense is not None:
            return metrics.row_errors(self.dense if arm is None else arm, self.expected)
        actual = self.values if arm is None else self._at_returned(arm)
        return metrics.row_errors(actual, self._at_returned(self.expected))

    def within_top(self, k: int | None) -> tuple[Tensor, Tensor]:
        """Return [n] the largest error within the reference's top k (at least), and [n] whether that is all of it."""
        if k not in self._tops:
            if self.dense is not None:
                missing = {size for size in (*TOL_MAP, k) if size is not None}
                found = logit_errors(self.dense, self.expected, dtype=self.dtype, ks=sorted(missing))
                whole = torch.ones(self.expected.shape[0], dtype=torch.bool)
                for label, value in found.topk.items():
                    self._tops[None if label == "all" else int(label)] = (value * self.largest, whole)
            else:
                self._tops[k] = self._partial_top(k)
        return self._tops[k]

    def _partial_top(self, k: int | None) -> tuple[Tensor, Tensor]:
        size = min(k or self.expected.shape[-1], self.expected.shape[-1])
        n = self.expected.shape[0]
        values, known = torch.empty(n, dtype=torch.float64), torch.empty(n, dtype=torch.bool)
        for row in range(n):
            logprobs = self.expected[row].double().log_softmax(-1)
            told = torch.full_like(logprobs, float("nan"))
            there = self.there[row]
            told[self.ids[row][there]] = self.values[row][there]
            top = logprobs.topk(size)
            ours = told[top.indices]
            missing = ours.isnan()
            # Not returned, so at most `least`: the error is at least what the reference's exceeds that by.
            error = torch.where(missing, (top.values - self.least[row]).clamp_min(0), (ours - top.values).abs())
            values[row], known[row] = error.amax(), not bool(missing.any())
        return values, known

    def divergence(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return [n]: by how much the target prefers another token (0 where not), whether known, and one ulp."""
        top = self.expected.argmax(-1)
        if self.dense is not None:
            dense = self.dense
            ahead = dense.double().amax(-1) - dense.double().gather(-1, top[:, None])[:, 0]
            ahead = torch.where(ahead.isfinite(), ahead, torch.inf)
            return ahead, torch.ones(len(top), dtype=torch.bool), ulp(dense.abs().amax(-1), self.dtype)
        best = torch.where(self.there, self.values, -torch.inf).amax(-1)
        at_top = (self.ids == top[:, None]) & self.there
        known = at_top.any(-1)
        value = torch.where(known, torch.where(at_top, self.values, 0.0).sum(-1), self.least)
        return best - value, known, ulp(self.largest, self.dtype)

    def verdicts(self, tol_map: TolMap | None, tolerance: float | None, name: str) -> list[Verdict]:
        """Apply every rule that was asked for."""
        partial = "" if self.dense is not None else f" over the {self.returned} most likely tokens"
        verdicts: list[Verdict] = []
        if self.baseline is not None:
            verdicts += self._three_way(f"{name}{partial}")
        for k, limit in (tol_map or {}).items():
            atol, rtol = limit if isinstance(limit, tuple) else (ATOL, limit)
            value, known = self.within_top(k)
            verdicts.append(
                level_gates.within(
                    (value - atol).clamp_min(0) / self.largest,
                    known,
                    torch.tensor(rtol),
                    claim=f"{name}: error within the top {k if k is not None else 'of the whole vocabulary'}",
                    metric=f"top_{k if k is not None else 'all'}_error",
                    source=f"rtol={rtol:g} of the largest logit, after atol={atol:g}",
                )
            )
        verdicts.append(self._divergence(tolerance, name))
        if self.dense is None and not (tol_map and None in tol_map):
            rest = self.expected.shape[-1] - self.returned
            why = f"the source returned {self.returned} of {self.expected.shape[-1]} log-probabilities"
            verdicts.append(
                gates.single(
                    Status.NOT_MEASURED, f"{name}: the other {rest} logits are right", "rest", why, n=self.returned
                )
            )
        return verdicts

    def _three_way(self, name: str) -> list[Verdict]:
        assert self.baseline is not None
        target, baseline = self.errors(None), self.errors(self.baseline)
        evidence: dict[str, Any] = {}
        if self.dense is not None:
            a, b = (metrics.errors(x, self.expected) for x in (self.dense, self.baseline))
        else:
            e = self._at_returned(self.expected)
            a, b = self.values - e, self._at_returned(self.baseline) - e
        coefficient = error_laws.bhattacharyya(a, b)
        evidence["bhattacharyya"] = finite(coefficient)
        if len(self.controls) < gates.MIN_CONTROLS:
            return level_gates.three_way_rows(target, baseline, name=name, evidence=evidence)
        phases = ["row"] * target.n
        of = [
            ControlErrors.of(f"control {i}", metrics.model_errors(self.errors(control), baseline, phases))
            for i, control in enumerate(self.controls)
        ]
        measured = metrics.model_errors(target, baseline, phases)
        # The one phase here repeats "all".
        measured = dataclasses.replace(measured, rms={"all": measured.rms["all"]})
        dtype = str(self.dtype).removeprefix("torch.")
        found = gates.whole_model(measured, of, arm=dtype, n=target.n)
        return [dataclasses.replace(v, claim=v.claim.replace(dtype, name, 1)) for v in found]

    def _divergence(self, tolerance: float | None, name: str) -> Verdict:
        ahead, known, ulp = self.divergence()
        if tolerance is not None:
            bound, source = torch.tensor(tolerance, dtype=torch.float64), f"divergence_difference_tol={tolerance:g}"
        else:
            bound, source = ulp, f"one ulp of {str(self.dtype).removeprefix('torch.')} at the largest logit"
            if self.baseline is not None:
                error = float(self.errors(self.baseline).linf.amax()) * level_gates.DIVERGENCE_SLACK
                bound = bound.clamp_min(error)
                source += f", or {level_gates.DIVERGENCE_SLACK:g} times the baseline's largest error"
        return level_gates.within(
            ahead,
            known | (ahead <= 0),
            bound,
            claim=f"{name}: where another token is preferred, it is by no more than rounding",
            metric="divergence_difference",
            source=source,
            rows_diverging=int((ahead > 0).sum()),
        )

    def rows(self, where: Sequence[tuple[int, int, int]]) -> list[dict[str, Any]]:
        """Lay out the numbers of every row."""
        errors = {k: self.within_top(k) for k in TOL_MAP}
        ahead, known, _ = self.divergence()
        return [
            {
                "prompt": prompt,
                "step": step,
                "batch_row": batch_row,
                "errors": {
                    "all" if k is None else str(k): finite(float(value[row] / self.largest[row]))
                    if there[row]
                    else None
                    for k, (value, there) in errors.items()
                },
                "top1": bool(ahead[row] <= 0),
                "difference": finite(float(ahead[row])) if known[row] else None,
            }
            for row, (prompt, step, batch_row) in enumerate(where)
        ]
