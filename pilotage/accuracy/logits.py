"""Level 2 for anything that generates: `logit_validation` and `multi_prompt_logit_validation`.

The reference's logits say which tokens come next; whatever is validated is made to follow them (`forcing`), and every
step's logits are compared. With a baseline (the reference in the serving dtype) the claim is that the target errs no
more than it; without one the error is held against a map of tolerances by top k.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pilotage.accuracy import gates
from pilotage.accuracy.forcing import Followed, Found, Generate, How, Ids, TopLogprobs, follow
from pilotage.accuracy.logit_rows import TOL_MAP, Compared, TolMap
from pilotage.core.errors import BadInput
from pilotage.core.nouns import Status, Verdict, worst


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

    compared = Compared(
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
