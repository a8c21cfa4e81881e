"""`pilotage kernels check`: every implementation that can run here, against the definition.

A result may err as much as the definition does in the same dtype, both held against the definition in fp64. Beside
the numbers: every element is written (fresh memory is NaN), arguments are left alone, two runs are bitwise equal,
NaN and infinities show where they do in the definition and nowhere else, and gradients are those of the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pilotage.accuracy import gates
from pilotage.core.errors import BadInput, ConfigError, PilotageError
from pilotage.core.nouns import Status, Verdict, worst
from pilotage.functional import registry
from pilotage.functional.domain import Domain
from pilotage.functional.registry import DEFINITION, Implementation
from pilotage.kernels import cases, edges, scrutiny
from pilotage.kernels.cases import Case
from pilotage.kernels.table import short

DTYPES = (torch.float32, torch.bfloat16)
_FLOOR = 16 * torch.finfo(torch.float32).eps  # relative L2: sums of fp32 in another order
_GRADIENT_RTOL = 1e-4
_NON_FINITE = (float("nan"), float("inf"))

CHECKS = ("values", "written", "arguments", "repeats", "non-finite", "gradient")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check of one case says.

    Attributes:
        check: one of `CHECKS`.
        case: label of the case.
        status: of the check.
        detail: what is wrong, in words.
    """

    check: str
    case: str
    status: Status
    detail: str = ""


@dataclass(kw_only=True)
class Checked:
    """What became of one implementation.

    Attributes:
        ran: cases it computed.
        refused: reason -> number of cases outside its domain.
        missing: why it cannot run here at all, or None.
        ratio: its error over the definition's in the same dtype, by dtype, over all cases; None where both are exact.
    """

    operator: str
    implementation: str
    language: str
    ran: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    missing: str | None = None
    ratio: dict[str, float | None] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def status(self) -> Status:
        """Not measured if it ran no case; else the worst finding."""
        return worst([finding.status for finding in self.findings]) if self.ran else Status.NOT_MEASURED

    @property
    def failures(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.status is not Status.PASS]

    def of(self, check: str) -> Status | None:
        """Return the status of one check over all cases; None if it does not apply."""
        found = [finding.status for finding in self.findings if finding.check == check]
        return worst(found) if found else None

    def to_json(self) -> dict[str, Any]:
        return {
            "operator": self.operator,
            "implementation": self.implementation,
            "language": self.language,
            "status": self.status.value,
            "missing": self.missing,
            "cases": self.ran,
            "refused": self.refused,
            "ratio": self.ratio,
            "checks": {name: status.value for name in CHECKS if (status := self.of(name)) is not None},
            "failures": [
                {"check": one.check, "case": one.case, "status": one.status.value, "detail": one.detail}
                for one in self.failures
            ],
        }


def status_of(results: Sequence[Checked]) -> Status:
    """Combine: what cannot run here does not count, and nothing at all is not measured."""
    return worst([one.status for one in results if one.missing is None and one.ran])


def check(
    operator: str,
    *,
    implementation: str | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES,
    dims: Mapping[str, int] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Checked]:
    """Check the implementations of an operator.

    Args:
        operator: its name.
        implementation: only this one; None for all but the definition.
        dtypes: of the float tensors.
        dims: letters of the usual case, where the defaults do not suit.
        progress: told what is computed.

    Raises:
        ConfigError: no such operator or implementation.
    """
    found = [one for one in registry.implementations(operator) if one.name != DEFINITION]
    if implementation is not None:
        found = [one for one in found if one.name == implementation]
        if not found:
            names = ", ".join(one.name for one in registry.implementations(operator) if one.name != DEFINITION)
            raise ConfigError(
                f"no implementation {implementation!r}",
                where=operator,
                do=f"there is {names or 'the definition alone'}",
            )
    return [_Checker(operator, one, dtypes, dims or {}, progress).run() for one in found]


class _Checker:
    def __init__(
        self,
        operator: str,
        one: Implementation,
        dtypes: Sequence[torch.dtype],
        dims: Mapping[str, int],
        progress: Callable[[str], None],
    ) -> None:
        self.operator, self.one, self.dtypes, self.dims, self.progress = operator, one, dtypes, dims, progress
        self.definition = next(item for item in registry.implementations(operator) if item.name == DEFINITION)
        self.mutated = cases.MUTATED.get(operator, ())
        self.result = Checked(operator=operator, implementation=one.name, language=one.language)
        self.pooled: dict[torch.dtype, list[tuple[Tensor, Tensor, Tensor]]] = {}

    def run(self) -> Checked:
        device = self._device()
        if device is None:
            return self.result
        for dtype in self.dtypes:
            planned = edges.plan(self.operator, self.one, dtype, self.dims, device)
            accepted = [case for case in planned if self._accepts(case)]
            for case in accepted:
                self.progress(f"{self.one.name}, {case.label}")
                self._case(case)
            for case in accepted[:1]:
                self._non_finite(case, _NON_FINITE)
                self._gradient(case)
            wrong = {finding.case for finding in self.result.failures}
            for case in accepted:
                if case.seed == edges.OF_AN_OPTION and dtype == self.dtypes[0] and case.label not in wrong:
                    self._non_finite(case, _NON_FINITE[:1])
            self._pool(dtype)
        return self.result

    def _device(self) -> str | None:
        domain = self.one.domain
        if isinstance(domain, Domain) and domain.machine is not None and (missing := domain.machine()) is not None:
            self.result.missing = missing
            return None
        if not isinstance(domain, Domain) or not domain.targets or "cpu" in domain.targets:
            return "cpu"
        if "cuda" in domain.targets and torch.cuda.is_available():
            return "cuda"
        if domain.emulator is not None and domain.emulator.active():
            return "cpu"
        self.result.missing = f"no {' or '.join(domain.targets)} device"
        if domain.emulator is not None:
            self.result.missing += f"; {domain.emulator.how} runs it in {domain.emulator.name}"
        return None

    def _accepts(self, case: Case) -> bool:
        domain = self.one.domain
        refusal = domain.judge(case.call, worth=False) if isinstance(domain, Domain) else self.one.judge(case.call)
        if refusal is not None:
            self.result.refused[refusal.words] = self.result.refused.get(refusal.words, 0) + 1
        return refusal is None

    def _note(self, check: str, case: str, wrong: str = "", status: Status = Status.FAIL) -> None:
        self.result.findings.append(
            Finding(check=check, case=case, status=status if wrong else Status.PASS, detail=wrong)
        )

    def _call(self, one: Implementation, case: Case, arguments: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return the results of a call, and what it wrote in place."""
        args, kwargs = case.split(arguments)
        returned = one.function(*args, **kwargs)
        results = () if returned is None else tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
        return (*results, *(arguments[name] for name in self.mutated))

    def _case(self, case: Case) -> None:
        first, second = scrutiny.copies(case.arguments), scrutiny.copies(case.arguments)
        try:
            with torch.no_grad(), scrutiny.poisoned():
                got, again = self._call(self.one, case, first), self._call(self.one, case, second)
        except Exception as error:  # a kernel may raise anything; that is a finding, not our failure
            self._note("values", case.label, _words(error))
            self.result.ran += 1
            return
        with torch.no_grad():
            baseline = self._call(self.definition, case, scrutiny.copies(case.arguments))
            with scrutiny.Double():
                expected = self._call(self.definition, case, scrutiny.doubled(case.arguments))
        self.result.ran += 1
        changed = [
            name
            for name, value in case.arguments.items()
            if isinstance(value, Tensor) and name not in self.mutated and not scrutiny.same_bits(value, first[name])
        ]
        self._note("arguments", case.label, f"{', '.join(changed)} changed" if changed else "")
        differ = any(not scrutiny.same_bits(a, b) for a, b in zip(got, again, strict=True))
        self._note("repeats", case.label, "two runs differ" if differ else "")
        self._values(case, got, baseline, expected)

    def _values(
        self, case: Case, got: Sequence[Tensor], baseline: Sequence[Tensor], expected: Sequence[Tensor]
    ) -> None:
        if [(x.shape, x.dtype) for x in got] != [(x.shape, x.dtype) for x in baseline]:
            shapes = [f"{tuple(x.shape)} {short(x.dtype)}" for x in got]
            wanted = [f"{tuple(x.shape)} {short(x.dtype)}" for x in baseline]
            self._note("values", case.label, f"results are {', '.join(shapes)}, not {', '.join(wanted)}")
            return
        for a, b, c in zip(got, baseline, expected, strict=True):
            unwritten = int((~torch.isfinite(a.float()) & torch.isfinite(b.float())).sum())
            of = f"{unwritten} of {a.numel()} elements are not finite: not written, or wrong"
            self._note("written", case.label, of if unwritten else "")
            if unwritten:
                continue
            a, b, c = (x[: case.rows] for x in (a, b, c))
            if not a.is_floating_point():
                wrong = int((a != b).sum())
                self._note("values", case.label, f"{wrong} of {a.numel()} integers differ" if wrong else "")
                continue
            a, b, c = (scrutiny.as_rows(x) for x in (a, b, c))
            self._verdicts(case.label, self._three_way(a, b, c, case.label))
            self.pooled.setdefault(case.dtype, []).append((a.double(), b.double(), c.double()))

    def _three_way(self, got: Tensor, baseline: Tensor, expected: Tensor, name: str) -> list[Verdict]:
        if isinstance(self.one.domain, Domain) and self.one.domain.error != 1:
            baseline = expected + (baseline.double() - expected) * self.one.domain.error  # what it may err
        return gates.three_way(got, expected, baseline, rtol=_FLOOR, name=name)

    def _verdicts(self, label: str, verdicts: Sequence[Verdict], *, pooled: bool = False) -> None:
        """Note what is wrong. One small case may be too few numbers; all of them together decide then."""
        for verdict in verdicts:
            if verdict.status is Status.FAIL or (pooled and verdict.status is Status.NOT_MEASURED):
                value = "" if verdict.estimate is None else f" {verdict.estimate:.3g}"
                bound = "" if verdict.bound is None else f", bound {verdict.bound:.3g}"
                self._note("values", label, f"{verdict.metric}{value}{bound} ({verdict.bound_source})", verdict.status)
                return
        self._note("values", label)

    def _pool(self, dtype: torch.dtype) -> None:
        pieces = self.pooled.get(dtype)
        if not pieces:
            return
        together = []
        for index in range(3):
            scaled = [piece[index] / max(float(piece[2].square().mean().sqrt()), 1e-30) for piece in pieces]
            together.append(torch.cat([x.reshape(-1) for x in scaled]))
        got, baseline, expected = together
        of_baseline = float((baseline - expected).square().sum())
        ratio = float((got - expected).square().sum()) / of_baseline if of_baseline else None
        self.result.ratio[short(dtype)] = None if ratio is None else ratio**0.5
        name = f"all cases, {short(dtype)}"
        self._verdicts(name, self._three_way(got, baseline, expected, name), pooled=True)

    def _non_finite(self, case: Case, values: Sequence[float]) -> None:
        for name, value in case.arguments.items():
            if not isinstance(value, Tensor) or value.dtype not in DTYPES or name in self.mutated or not value.numel():
                continue
            at = scrutiny.meaningful(name, case.arguments)
            with torch.no_grad():
                clean = self._call(self.definition, case, scrutiny.copies(case.arguments))
                moved = self._call(
                    self.definition, case, scrutiny.replaced(case.arguments, name, at, float(value[at]) + 1)
                )
            depends = [a != b for a, b in zip(clean, moved, strict=True)]
            for bad in values:
                label = f"{bad} in {name}, {case.label}"
                try:
                    with torch.no_grad():
                        got = self._call(self.one, case, scrutiny.replaced(case.arguments, name, at, bad))
                except Exception as error:
                    self._note("non-finite", label, _words(error))
                    continue
                with torch.no_grad():
                    wanted = self._call(self.definition, case, scrutiny.replaced(case.arguments, name, at, bad))
                hides = isinstance(self.one.domain, Domain) and self.one.domain.hides_non_finite
                self._note(
                    "non-finite", label, scrutiny.spread(case, got, wanted, depends, hides=hides, nan=bad != bad)
                )

    def _gradient(self, case: Case) -> None:
        domain = self.one.domain
        if case.dtype != torch.float32 or not isinstance(domain, Domain) or not domain.gradient or self.mutated:
            return
        found = []
        for one in (self.one, self.definition):
            arguments = scrutiny.copies(case.arguments)
            leaves = {  # 0 times the NaN of a page that nobody owns would be the gradient of everything
                name: value.nan_to_num_().requires_grad_()
                for name, value in arguments.items()
                if isinstance(value, Tensor) and value.dtype == torch.float32
            }
            results = [out for out in self._call(one, case, arguments) if out.is_floating_point() and out.requires_grad]
            generator = torch.Generator().manual_seed(1)
            loss = sum((out * torch.randn(out.shape, generator=generator).to(out.device)).sum() for out in results)
            grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)  # type: ignore[arg-type]
            found.append(dict(zip(leaves, grads, strict=True)))
        for name, wanted in found[1].items():
            got = found[0][name]
            if wanted is None or got is None:
                reached = wanted is None and (got is None or not got.any())
                self._note("gradient", f"of {name}", "" if reached else "one of both has none")
                continue
            verdict = gates.two_way(got, wanted, rtol=_GRADIENT_RTOL, atol=1e-6, name=f"gradient of {name}")
            wrong = "" if verdict.status is Status.PASS else f"off by {verdict.estimate} of the largest"
            self._note("gradient", f"of {name}", wrong)


def _words(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return str(error) if isinstance(error, (PilotageError, BadInput)) else f"{type(error).__name__}: {first}"
