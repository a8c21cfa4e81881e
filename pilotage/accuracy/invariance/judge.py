"""From the rows of two conditions to verdicts: what is bitwise must be, the rest stays within the dtype's noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pilotage.accuracy import gates
from pilotage.accuracy.invariance.noise import Noise
from pilotage.accuracy.invariance.rows import Difference
from pilotage.core.nouns import Status, Verdict, worst

SHOWN = 12  # broken rows that are listed; the counts are of all
MIN_POOLED = 48  # rows; fewer are only held against the bound of single rows


@dataclass(frozen=True, kw_only=True)
class Result:
    """One relation under one condition of one engine.

    Attributes:
        relation: which one.
        engine: name of the engine, e.g. "bfloat16, compiled".
        condition: what is special about it.
        verdicts: `bitwise` for the rows that the same graphs computed at the same places, `bounded` for the others,
            `tokens` where a wrong one was answered, or where there are no rows to compare.
        broke: the rows that broke it, the first of each prompt first.
        reason: why it was not measured.
        counted: False where the target does not have what the relation is about, so that nothing could be broken.
        how: engine settings and schedule that do it again; JSON values.
        worst: the largest relative difference of a row.
    """

    relation: str
    engine: str
    condition: str
    verdicts: list[Verdict] = field(default_factory=list)
    broke: list[dict[str, Any]] = field(default_factory=list)
    reason: str = ""
    counted: bool = True
    how: Mapping[str, Any] = field(default_factory=dict)
    worst: float | None = None

    @property
    def status(self) -> Status:
        return worst([verdict.status for verdict in self.verdicts])

    @property
    def expects(self) -> str:
        """What the relation declares: "bitwise", "bounded", both for different rows, or "tokens"."""
        return " and ".join(
            verdict.metric for verdict in self.verdicts if verdict.metric in ("bitwise", "bounded", "tokens")
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "relation": self.relation,
            "engine": self.engine,
            "condition": self.condition,
            "status": self.status.value,
            "expects": self.expects,
            "reason": self.reason,
            "counted": self.counted,
            "worst": self.worst if self.worst is None or math.isfinite(self.worst) else None,
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
            "broke": self.broke,
            "how": dict(self.how),
        }


def judge(
    found: Sequence[Difference],
    noise: Noise,
    *,
    relation: str,
    engine: str,
    condition: str,
    names: Sequence[str],
    how: Mapping[str, Any] | None = None,
    spoken: tuple[Verdict, list[dict[str, Any]]] | None = None,
) -> Result:
    """Judge the rows of a condition.

    Args:
        found: every compared row.
        noise: of the dtype.
        relation, engine, condition, how: for the result.
        names: of the streams.
        spoken: what `tokens.judge` says of the tokens; None where they are not known.
    """
    claim = f"{relation}, {condition}"
    exact = [row for row in found if row.same_way]
    loose = [row for row in found if not row.same_way]
    verdicts = []
    broken: list[tuple[Difference, str, float]] = []
    if exact:
        unequal = [row for row in exact if not row.equal]
        verdicts.append(
            Verdict(
                claim=f"{claim}: rows that the same graphs compute at the same places are bitwise equal",
                metric="bitwise",
                estimate=float(len(unequal)),
                bound=0.0,
                bound_source="the same instructions on the same bits",
                n=len(exact),
                status=gates.by_value(len(unequal), 0),
            )
        )
        broken += [(row, "bitwise", 0.0) for row in unequal]
    if loose:
        bound, pooled_bound = noise.row_bound, noise.pooled_bound
        if bound is None or pooled_bound is None:
            why = f"{len(noise.row)} clean variants of the model; a bound needs {gates.MIN_CONTROLS}"
            verdicts.append(gates.single(Status.NOT_MEASURED, claim, "bounded", why, n=len(loose)))
        else:
            largest = max(row.relative for row in loose)
            pooled = math.sqrt(math.fsum(min(row.relative, 1e150) ** 2 for row in loose) / len(loose))
            verdicts.append(
                Verdict(
                    claim=f"{claim}: every row within the noise of {noise.dtype}",
                    metric="bounded",
                    estimate=largest if math.isfinite(largest) else None,
                    bound=bound,
                    bound_source=noise.source,
                    n=len(loose),
                    status=gates.by_value(largest, bound),
                )
            )
            if len(loose) >= MIN_POOLED:
                verdicts.append(
                    Verdict(
                        claim=f"{claim}: all rows together within the noise of {noise.dtype}",
                        metric="pooled",
                        estimate=pooled,
                        bound=pooled_bound,
                        bound_source=noise.source,
                        n=len(loose),
                        status=gates.by_value(pooled, pooled_bound),
                    )
                )
            broken += [(row, "bounded", bound) for row in loose if not row.relative <= bound]
    said: list[dict[str, Any]] = []
    if spoken is not None and (spoken[1] or not verdicts):
        verdicts.append(spoken[0])
        said = spoken[1]
    if not verdicts:
        verdicts.append(gates.single(Status.NOT_MEASURED, claim, "rows", "no row was computed under both conditions"))
    return Result(
        relation=relation,
        engine=engine,
        condition=condition,
        verdicts=verdicts,
        broke=[*said, *(_told(row, kind, bound, names) for row, kind, bound in _first_of_each(broken)[:SHOWN])],
        how=how or {},
        worst=max((row.relative for row in found), default=None),
    )


def _first_of_each(broken: Sequence[tuple[Difference, str, float]]) -> list[tuple[Difference, str, float]]:
    """Put the first broken row of each request in front, the others after them, by position."""
    ordered = sorted(broken, key=lambda item: (item[0].request, item[0].position))
    first = {item[0].request: item for item in reversed(ordered)}
    heads = sorted(first.values(), key=lambda item: item[0].request)
    return [*heads, *(item for item in ordered if first[item[0].request] is not item)]


def _told(row: Difference, kind: str, bound: float, names: Sequence[str]) -> dict[str, Any]:
    return {
        "prompt": names[row.stream],
        "stream": row.stream,
        "request": row.request,
        "position": row.position,
        "phase": "decode" if row.way.kind == "decode" else "prefill",
        "expected": kind,
        "difference": row.relative if math.isfinite(row.relative) else None,
        "bound": bound,
        "computed": str(row.way),
        "chunk": [row.way.start, row.way.count],
        "graph": f"{row.way.kind}-{row.way.size}",
        "offset": row.way.offset,
    }
