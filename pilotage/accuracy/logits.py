"""Level 2 for anything that generates: `logit_validation` and `multi_prompt_logit_validation`.

The reference's logits say which tokens come next; whatever is validated is made to follow them (`forcing`), and every
step's logits are compared. With a baseline (the reference in the serving dtype) the claim is that the target errs no
more than it; without one the error is held against a map of tolerances by top k.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pilotage.accuracy import error_laws, gates, level_gates, metrics
from pilotage.accuracy.comparison import finite
from pilotage.accuracy.forcing import Followed, Found, Generate, How, Ids, TopLogprobs, follow
from pilotage.accuracy.gates import ControlErrors
from pilotage.core.errors import BadInput
from pilotage.core.nouns import Status, Verdict, worst

ATOL = 1e-5
# k -> (atol, rtol); None is the whole vocabulary. The tolerances of vLLM Neuron.
TOL_MAP: dict[int | None, tuple[float, float]] = {
    5: (ATOL, 0.011),
    50: (ATOL, 0.02),
    1000: (ATOL, 0.03),
    None: (ATOL, 0.05),
}
TolMap = Mapping[int | None, float | tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class LogitValidation:
    """What a validation of logits found; true exactly when it passed.

    Attributes:
        name: what was validated.
        verdicts: what was claimed and how it turned out.
        rows: for each compared step: prompt, step, batch row, errors by k, whether the most likely tokens agree, and
            by how much they do not.
        calls: how often the source was asked.
        divergences: (prompt, step) at which it said another token than the reference and was led back.
        logits: for each prompt what was collected: [steps, batch, V], or the top of it.
    """

    name: str
    verdicts: list[Verdict]
    rows: list[dict[str, Any]]
    calls: int
    divergences: list[tuple[int, int]]
    logits: list[Found]

    @property
    def status(self) -> Status:
        return worst([verdict.status for verdict in self.verdicts])

    @property
    def measured(self) -> Status:
        """The status of what could be measured: of the top k where a server returns no more."""
        return worst([v.status for v in self.verdicts if v.status is not Status.NOT_MEASURED])

    def __bool__(self) -> bool:
        return self.status is Status.PASS

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "status": self.status.value,
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
            "rows": self.rows,
            "calls": self.calls,
            "divergences": [list(found) for found in self.divergences],
        }


def logit_validation(
    input_ids: Ids,
    generate_fn: Generate,
    expected_logits: Tensor,
    tol_map: TolMap | None = None,
    divergence_difference_tol: float | None = None,
    baseline_logits: Tensor | None = None,
    *,
    controls: Sequence[Tensor] | None = None,
    expected_tokens: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    how: How = "auto",
    name: str = "logits",
) -> LogitValidation:
    """Validate the logits of a batch of prompts of one model.

    Args:
        input_ids: [batch, prompt] tokens; a list of lists where the lengths differ.
        generate_fn: continues prompts: ids -> logits [steps, batch, V], or (logits, sequences). It may return more or
            fewer steps than there are expected ones; with a method `forced` it is forced in one pass.
        expected_logits: [steps, batch, V] logits of the reference while it followed `expected_tokens`.
        tol_map: k -> rtol or (atol, rtol) on the largest error within the reference's top k (None: all of them) over
            its largest magnitude. None: `TOL_MAP`, or with a baseline no such rule.
        divergence_difference_tol: how far the target may prefer another token to the reference's. None: one ulp of
            `dtype` at its largest logit; with a baseline, or what three times its largest error allows.
        baseline_logits: [steps, batch, V] of the reference in the serving dtype on the same tokens.
        controls: further clean computations of the same logits. With at least 8, and a baseline, the bounds are
            their 99.9% prediction limits instead of constants.
        expected_tokens: [steps, batch] tokens to follow; None for the reference's most likely ones.
        dtype: that the target computes in.
        how: "retry", "one_pass" or "auto".
        name: for the claims.

    Raises:
        BadInput: shapes do not fit.
    """
    return multi_prompt_logit_validation(
        [input_ids],
        generate_fn,
        [expected_logits],
        tol_map,
        divergence_difference_tol,
        None if baseline_logits is None else [baseline_logits],
        controls=None if controls is None else [[control] for control in controls],
        expected_tokens=None if expected_tokens is None else [expected_tokens],
        dtype=dtype,
        how=how,
        name=name,
    )


def multi_prompt_logit_validation(
    input_ids: Sequence[Ids],
    generate_fn: Generate,
    expected_logits: Sequence[Tensor],
    tol_map: TolMap | None = None,
    divergence_difference_tol: float | None = None,
    baseline_logits: Sequence[Tensor] | None = None,
    *,
    controls: Sequence[Sequence[Tensor]] | None = None,
    expected_tokens: Sequence[Tensor] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    how: How = "auto",
    name: str = "logits",
) -> LogitValidation:
    """Validate the logits of several prompts, judged together: their rows are pooled, and any row can fail alone.

    The arguments are those of `logit_validation`, each with one entry a prompt (`controls`: for each control).
    """
    if len(input_ids) != len(expected_logits):
        raise BadInput(f"{len(input_ids)} prompts, but {len(expected_logits)} expected logits", where="input_ids")
    followed: list[Followed] = []
    for index, (ids, expected) in enumerate(zip(input_ids, expected_logits, strict=True)):
        if expected.ndim != 3 or expected.shape[1] != len(ids):
            raise BadInput(
                f"shape {tuple(expected.shape)}; expected [steps, {len(ids)}, vocabulary]", where="expected_logits"
            )
        tokens = expected.argmax(-1) if expected_tokens is None else expected_tokens[index]
        followed.append(follow(ids, generate_fn, tokens, how=how))
    others = {"baseline_logits": [baseline_logits] if baseline_logits is not None else [], "controls": controls or []}
    for what, arms in others.items():
        for arm in arms:
            shapes = [tuple(x.shape) for x in arm]
            if shapes != [tuple(x.shape) for x in expected_logits]:
                raise BadInput(f"shapes {shapes} are not those of expected_logits", where=what)

    steps = [_steps(found.found) for found in followed]
    where = [
        (prompt, step, row)
        for prompt, count in enumerate(steps)
        for step in range(count)
        for row in range(expected_logits[prompt].shape[1])
    ]

    def rows(arm: Sequence[Tensor]) -> Tensor:
        return torch.cat([x[:count].reshape(-1, x.shape[-1]) for x, count in zip(arm, steps, strict=True)]).float()

    compared = _Compared(
        [found.found for found in followed],
        expected=rows(expected_logits),
        baseline=None if baseline_logits is None else rows(baseline_logits),
        controls=[rows(control) for control in controls or []],
        dtype=dtype,
    )
    if tol_map is None and baseline_logits is None:
        tol_map = TOL_MAP
    verdicts = compared.verdicts(tol_map, divergence_difference_tol, name)
    absent = sum(x.shape[0] - count for x, count in zip(expected_logits, steps, strict=True))
    if absent:
        why = f"the source stopped {absent} steps before the reference"
        verdicts.append(gates.single(Status.NOT_MEASURED, f"{name}: every step was computed", "steps", why))
    return LogitValidation(
        name=name,
        verdicts=[_located(verdict, where) for verdict in verdicts],
        rows=compared.rows(where),
        calls=sum(found.calls for found in followed),
        divergences=[(prompt, step) for prompt, found in enumerate(followed) for step in found.divergences],
        logits=[found.found for found in followed],
    )


def _steps(found: Found) -> int:
    return found.steps if isinstance(found, TopLogprobs) else found.shape[0]


def _located(verdict: Verdict, where: Sequence[tuple[int, int, int]]) -> Verdict:
    if "row" not in verdict.evidence:
        return verdict
    evidence = dict(verdict.evidence)
    prompt, step, row = where[evidence.pop("row")]
    return dataclasses.replace(verdict, evidence={**evidence, "prompt": prompt, "step": step, "batch_row": row})


class _Compared:
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
                found = metrics.logit_errors(self.dense, self.expected, dtype=self.dtype, ks=sorted(missing))
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
            return ahead, torch.ones(len(top), dtype=torch.bool), metrics.ulp(dense.abs().amax(-1), self.dtype)
        best = torch.where(self.there, self.values, -torch.inf).amax(-1)
        at_top = (self.ids == top[:, None]) & self.there
        known = at_top.any(-1)
        value = torch.where(known, torch.where(at_top, self.values, 0.0).sum(-1), self.least)
        return best - value, known, metrics.ulp(self.largest, self.dtype)

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
