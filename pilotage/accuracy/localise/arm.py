"""One dtype of a localisation: reference, controls and target over the same rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from pilotage.accuracy.arms.tapped import HEAD_SITES, Cached, Handed, Request, Rows
from pilotage.accuracy.localise import blame, course, score
from pilotage.accuracy.localise.around import Misstep
from pilotage.accuracy.localise.blame import KV, Culprit, Finding
from pilotage.accuracy.localise.side import Known, joined, looks_up
from pilotage.core.errors import BadInput
from pilotage.core.nouns import Status

# Free-running logits this many times further off than the worst control's are not those of a clean model.
LOGITS = 3.0
RESTORED = 3.0


class Target(Protocol):
    """What is localised: a model whose sites can be recorded while a reference is handed onward."""

    @property
    def name(self) -> str: ...

    def names(self, tokens: Sequence[int]) -> list[str]: ...

    def observe(
        self, requests: Sequence[Request], sites: Sequence[str] | None = None, handed: Handed | None = None
    ) -> Rows: ...

    def cached(self, requests: Sequence[Request], handed: Handed) -> dict[str, Cached]: ...


@dataclass(frozen=True, kw_only=True)
class ArmReport:
    """What one dtype showed.

    Attributes:
        arm: dtype.
        target: how the target was run.
        sites: for each site {"site", "score", ...}, in the order of the model.
        findings: sites at fault.
        logits: error of the free-running logits of target and controls over the RMS of the expected ones.
        depth: relative error of the free-running residual stream, target and a control, in the order of the model.
        causal: what restoring the culprits does to the logits, None where there are none.
        unmeasured: why the arm says nothing, None if it does.
        missteps: what an engine fed or answered wrongly.
    """

    arm: str
    target: str
    sites: list[dict[str, Any]]
    findings: list[Finding]
    logits: dict[str, float]
    depth: list[dict[str, Any]] = field(default_factory=list)
    causal: dict[str, Any] | None = None
    unmeasured: str | None = None
    missteps: list[Misstep] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "arm": self.arm,
            "target": self.target,
            "logits": {name: score.finite(value) for name, value in self.logits.items()},
            "causal": self.causal,
            "not_measured": self.unmeasured,
            "sites": self.sites,
            "depth": self.depth,
            "missteps": [step.to_json() for step in self.missteps],
        }


class Bench:
    """One dtype: reference, controls and target over the same rows.

    Args:
        arm: dtype.
        requests: what is fed.
        known: Hugging Face's side.
        target: what is localised.
        ranks: of the target.
    """

    def __init__(self, arm: str, requests: Sequence[Request], known: Known, target: Target, ranks: int) -> None:
        self.arm, self.dtype, self.requests, self.target = arm, getattr(torch, arm), requests, target
        self.known, self.ranks = known, ranks
        self.expected, _ = known.models(arm)
        self.floor = score.floors(self.dtype)
        self.phases = [phase for request in requests for phase in request.phases()]
        self.where = [(r, p) for r, request in enumerate(requests) for p in range(request.length)]
        self.kept = [(r, p) for r, request in enumerate(requests) for p in request.kept]
        tokens = requests[0].tokens[:-1]
        ours, self.reference_sites = set(target.names(tokens)), self.expected.names(tokens)
        self.sites = [site for site in self.reference_sites if site in ours]

    def measure(self, top_k: int | None) -> ArmReport:
        """Hand the reference onward at every site, and score what each site made of it."""
        self.side = self.known.side(self.arm, self.requests, self.ranks, self.sites, top_k)
        self.handed = self.side.handed
        handed = Handed(rows=self.handed)
        observed = self.target.observe(self.requests, self.sites, handed)
        table: list[dict[str, Any]] = []
        findings: list[Finding] = []
        for site in self.sites:
            expected, controls = self.side.expected[site], self.side.controls[site]
            self._judge(site, observed.get(site), expected, controls, table, findings)
        self._cache(table, findings, handed)
        logits, depth = self._free_running()
        return ArmReport(
            arm=self.arm,
            target=self.target.name,
            sites=table,
            findings=findings,
            logits=logits,
            depth=depth,
            missteps=self._missteps(),
        )

    def _missteps(self) -> list[Misstep]:
        """Ask an engine which tokens it fed and answered; a model by itself has none of its own."""
        if any(not request.forced for request in self.requests) and hasattr(self.target, "choose"):
            self.target.choose(self.requests)
        return list(dict.fromkeys(getattr(self.target, "missteps", ())))

    def _judge(
        self,
        site: str,
        actual: Sequence[Tensor] | None,
        expected: Tensor,
        controls: Sequence[score.SiteErrors],
        table: list[dict[str, Any]],
        findings: list[Finding],
    ) -> None:
        where = self.kept if site in HEAD_SITES else self.where
        if actual is None:
            return
        rows, looked_up = joined(actual), self.side.looked_up.get(site)
        missing: Sequence[Tensor] = getattr(self.target, "missing", ())
        if any(bool(lost.any()) for lost in missing):
            # Rows of a prefix that was found in the cache were never computed: they are not measured.
            computed = torch.tensor([not bool(missing[r][p]) for r, p in where])
            where = [at for at, there in zip(where, computed.tolist(), strict=True) if there]
            rows, expected = rows[computed], expected[computed]
            controls = [control.taken(computed) for control in controls]
            looked_up = None if looked_up is None else looked_up[computed]
        if rows.shape != expected.shape:
            raise BadInput(
                f"the target has {list(rows.shape)} there, the reference {list(expected.shape)}",
                where=site,
                do="compare checkpoints of one architecture and size",
            )
        by_phase = [self._phase(r, p) for r, p in where]
        measured = score.measure(rows, expected)
        unlike = None if looked_up is None else float((rows != looked_up).double().mean())
        blocks = site.endswith(".heads") and self.dtype is torch.float32
        slack = score.ATTENTION_SLACK if blocks else 1.0
        dtype = self.side.dtypes.get(site, self.dtype)
        floor = score.floors(dtype)
        scored = score.score(
            measured, controls, by_phase, dtype, floor, rounds_once=looks_up(site), slack=slack, unlike=unlike
        )
        table.append({"site": site, **scored.to_json(), "by_position": course.by_position(where, scored.by_row)})
        if scored.status is Status.FAIL:
            findings.append(self._finding(site, scored, where, by_phase))

    def _finding(
        self, site: str, scored: score.Score, where: Sequence[tuple[int, int]], phases: Sequence[str]
    ) -> Finding:
        request, position = where[scored.worst]
        wrong = scored.by_row > score.BOUNDS["row"]
        positions = [p for (_, p), bad in zip(where, wrong.tolist(), strict=True) if bad]
        share = {
            phase: float(wrong[torch.tensor([found == phase for found in phases])].double().mean())
            for phase in dict.fromkeys(phases)
        }
        return Finding(
            key=site,
            arm=self.arm,
            score=scored,
            worst={"request": request, "position": position, "phase": self._phase(request, position)},
            first=min(positions, default=None),
            wrong=share,
        )

    def _phase(self, request: int, position: int) -> str:
        return self.requests[request].phases()[position]

    def _cache(self, table: list[dict[str, Any]], findings: list[Finding], handed: Handed) -> None:
        """Read the pages against what was handed to them: a contiguous oracle for the cache's addressing.

        Attention that is right whatever its pages look like has another layout and no fault, so only layers whose
        heads are wrong are read.
        """
        wrong = {f.key.removesuffix(".heads") for f in findings if f.key.endswith(".heads")}
        if not wrong:
            return
        for name, pages in self.target.cached(self.requests, handed).items():
            if name not in wrong or f"{name}.k_rope" not in self.handed:
                continue
            where = [(r, p) for r, request in enumerate(self.requests) for p in range(pages.first[r], request.length)]
            phases = [self._phase(r, p) for r, p in where]
            # What is cached is what was made last: values that are normalised once more are those.
            values = "v_norm" if f"{name}.v_norm" in self.handed else "v"
            for site, read in (("k_rope", pages.keys), (values, pages.values)):
                if f"{name}.{site}" not in self.handed:
                    continue
                rows = zip(self.handed[f"{name}.{site}"], pages.first, strict=True)
                expected = joined([whole[first:] for whole, first in rows])
                exact = score.measure(expected, expected)
                scored = score.score(score.measure(joined(read), expected), [exact], phases, self.dtype, self.floor)
                table.append({"site": f"{name}.{KV}", "side": site, **scored.to_json()})
                if scored.status is Status.FAIL:
                    findings.append(self._finding(f"{name}.{KV}", scored, where, phases))

    def _free_running(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Run everything without handing anything onward.

        Returns:
            Relative errors of the logits, and those of the residual stream by depth in target and first control.
        """
        side = self.side
        target = self.target.observe(self.requests, [*side.stream, "logits"])
        logits = {"target": joined(target["logits"]), **side.control_logits}
        depth = [
            {
                "site": site,
                "target": self._stream_error(target.get(site), site),
                "control": self._stream_error(side.control_stream.get(site), site),
            }
            for site in side.stream
        ]
        return {name: _relative(found, side.logits) for name, found in logits.items()}, depth

    def _stream_error(self, actual: Sequence[Tensor] | None, site: str) -> float | None:
        expected = joined(self.side.stream[site])
        if actual is None or (rows := joined(actual)).shape != expected.shape:
            return None
        missing: Sequence[Tensor] = getattr(self.target, "missing", ())
        if any(bool(lost.any()) for lost in missing):
            computed = torch.tensor([not bool(missing[r][p]) for r, p in self.where])
            rows, expected = rows[computed], expected[computed]
        return score.finite(_relative(rows, expected))

    def restore(self, groups: Sequence[tuple[str, Sequence[str]]], before: float) -> dict[str, Any]:
        """Run free but for some sites, where the reference is handed onward.

        Args:
            groups: name and sites of each kind at fault, the first culprit's first.
            before: error of the free-running logits.

        Returns:
            Errors of the logits with the first kind restored and with all of them.
        """
        after = {}
        sites: list[str] = []
        for index, (_, found) in enumerate(groups):
            sites += [site for site in found if site in self.handed]
            if index in (0, len(groups) - 1):
                handed = Handed(rows=self.handed, only=frozenset(sites))
                # Nothing comes after the logits: handing them onward would prove nothing and is not tried.
                if "logits" not in sites:
                    rows = self.target.observe(self.requests, [*sites, "logits"], handed)["logits"]
                    after["first" if index == 0 else "all"] = _relative(joined(rows), self.side.logits)
        if "first" in after:
            after.setdefault("all", after["first"])
        said = {f"after_{name}": score.finite(after[name]) if name in after else None for name in ("first", "all")}
        return {"arm": self.arm, "restored": groups[0][0], "before": score.finite(before), **said}


def _relative(actual: Tensor, expected: Tensor) -> float:
    measured = score.measure(actual, expected)
    total = float(measured.rows.expected_sq.sum())
    return math.sqrt(float(measured.rows.sq.sum()) / total) if total else math.inf


def conclude(arm: Bench, report: ArmReport, culprits: Sequence[Culprit]) -> ArmReport:
    """Check the culprits by what restoring them does, and a clean bill by the logits."""
    clean = max(value for name, value in report.logits.items() if name != "target")
    clean = max(clean, arm.floor.rms)
    before = report.logits["target"]
    ranked = [culprit for culprit in culprits if any(f.key == culprit.key for f in report.findings)]
    if not ranked:
        if before > LOGITS * clean and not culprits and not report.missteps:
            why = f"the logits are {before / clean:.1f} times further off than a clean model's, but no site shows why"
            return dataclasses.replace(report, unmeasured=why)
        return report
    families = [blame.family(culprit.kind) for culprit in ranked]
    groups = [
        (name, [_restorable(c.key) for c, found in zip(ranked, families, strict=True) if found == name])
        for name in dict.fromkeys(families)
    ]
    causal = arm.restore(groups, before)
    limit = RESTORED * clean
    causal["clean"] = clean
    for name, after in (("first_restores", "after_first"), ("all_restore", "after_all")):
        causal[name] = None if causal[after] is None else bool(causal[after] <= limit)
    return dataclasses.replace(report, causal=causal)


def _restorable(key: str) -> str:
    """Where a wrong cache is made good: the heads that read it."""
    return f"{key.removesuffix(f'.{KV}')}.heads" if key.endswith(f".{KV}") else key
