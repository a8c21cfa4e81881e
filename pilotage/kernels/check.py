"""`pilotage kernels check`: every implementation that can run here, against the definition.

A result may err as much as the definition does in the same dtype, both held against the definition in fp64. Beside
the numbers: every element is written (fresh memory is NaN), arguments are left alone, two runs are bitwise equal,
NaN and infinities show where they do in the definition and nowhere else, and gradients are those of the definition.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.utils.deterministic
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pilotage.accuracy import gates
from pilotage.core.errors import BadInput, ConfigError, PilotageError
from pilotage.core.nouns import Status, Verdict, worst
from pilotage.functional import registry
from pilotage.functional.domain import Domain
from pilotage.functional.registry import DEFINITION, Implementation
from pilotage.kernels import cases, edges
from pilotage.kernels.cases import Case
from pilotage.kernels.table import short

DTYPES = (torch.float32, torch.bfloat16)
_FLOOR = 16 * torch.finfo(torch.float32).eps  # relative L2: sums of fp32 in another order
_GRADIENT_RTOL = 1e-4

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


class _Double(TorchFunctionMode):
    """Compute in fp64 what asks for fp32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        named = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **named)


@contextlib.contextmanager
def _poisoned() -> Iterator[None]:
    """Fill fresh memory with NaN (integers with their largest value), torch's and numpy's."""
    settings: Any = torch.utils.deterministic
    numpy: Any = np
    before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    filled, empty, empty_like = settings.fill_uninitialized_memory, np.empty, np.empty_like

    def poison(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        array = make(*args, **kwargs)
        if array.dtype.kind == "f":
            array.fill(np.nan)
        return array

    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    numpy.empty, numpy.empty_like = functools.partial(poison, empty), functools.partial(poison, empty_like)
    try:
        yield
    finally:
        numpy.empty, numpy.empty_like = empty, empty_like
        settings.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


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
                self._non_finite(case)
                self._gradient(case)
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
        first, second = _copies(case.arguments), _copies(case.arguments)
        try:
            with torch.no_grad(), _poisoned():
                got, again = self._call(self.one, case, first), self._call(self.one, case, second)
        except Exception as error:  # a kernel may raise anything; that is a finding, not our failure
            self._note("values", case.label, _words(error))
            self.result.ran += 1
            return
        with torch.no_grad():
            baseline = self._call(self.definition, case, _copies(case.arguments))
            with _Double():
                expected = self._call(self.definition, case, _doubled(case.arguments))
        self.result.ran += 1
        changed = [
            name
            for name, value in case.arguments.items()
            if isinstance(value, Tensor) and name not in self.mutated and not _same(value, first[name])
        ]
        self._note("arguments", case.label, f"{', '.join(changed)} changed" if changed else "")
        differ = any(not _same(a, b) for a, b in zip(got, again, strict=True))
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
            a, b, c = (_rows(x) for x in (a, b, c))
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

    def _non_finite(self, case: Case) -> None:
        for name, value in case.arguments.items():
            if not isinstance(value, Tensor) or value.dtype not in DTYPES or name in self.mutated or not value.numel():
                continue
            at = _meaningful(name, case.arguments)
            with torch.no_grad():
                clean = self._call(self.definition, case, _copies(case.arguments))
                moved = self._call(self.definition, case, _replaced(case.arguments, name, at, float(value[at]) + 1))
            depends = [a != b for a, b in zip(clean, moved, strict=True)]
            for bad in (float("nan"), float("inf")):
                label = f"{bad} in {name}, {short(case.dtype)}"
                try:
                    with torch.no_grad():
                        got = self._call(self.one, case, _replaced(case.arguments, name, at, bad))
                except Exception as error:
                    self._note("non-finite", label, _words(error))
                    continue
                with torch.no_grad():
                    wanted = self._call(self.definition, case, _replaced(case.arguments, name, at, bad))
                hides = isinstance(self.one.domain, Domain) and self.one.domain.hides_non_finite
                self._note("non-finite", label, _spread(case, got, wanted, depends, hides=hides, nan=bad != bad))

    def _gradient(self, case: Case) -> None:
        domain = self.one.domain
        if case.dtype != torch.float32 or not isinstance(domain, Domain) or not domain.gradient or self.mutated:
            return
        found = []
        for one in (self.one, self.definition):
            arguments = _copies(case.arguments)
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


def _copies(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the tensors, strides and all; what lies between the rows is NaN."""
    out = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor) and not value.is_contiguous():
            reach = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
            whole = value.new_full((reach,), float("nan"))
            out[name] = whole.as_strided(value.shape, value.stride()).copy_(value)
        else:
            out[name] = value.clone() if isinstance(value, Tensor) else value
    return out


def _doubled(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.to(torch.float64) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }


def _same(a: Tensor, b: Tensor) -> bool:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.shape == b.shape and torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]) if x.ndim > 1 else x.reshape(1, -1)


def _meaningful(name: str, arguments: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the index of an element that takes part in the result."""
    value = arguments[name]
    if name == "affinities":  # of an expert that is chosen
        return (0, int(value[0].argmax()))
    if "block_table" in arguments and name in ("k_cache", "v_cache"):
        return (int(arguments["block_table"][0, 0]), 0, 0, 0)
    return (0,) * value.ndim


def _replaced(arguments: Mapping[str, Any], name: str, at: tuple[int, ...], value: float) -> dict[str, Any]:
    out = _copies(arguments)
    out[name][at] = value
    return out


def _spread(
    case: Case, got: Sequence[Tensor], wanted: Sequence[Tensor], depends: Sequence[Tensor], *, hides: bool, nan: bool
) -> str:
    """Say where NaN and infinities show that should not, or do not that should, or what else they changed.

    The definition may spread them further than what depends on them (a weight of 0 times NaN); nobody has to.
    """
    for a, b, reached in zip(got, wanted, depends, strict=True):
        a, b, reached = a[: case.rows].float(), b[: case.rows].float(), reached[: case.rows]
        finite = torch.isfinite(b)
        leaked = int((~torch.isfinite(a) & finite).sum())
        lost = 0 if hides else int((torch.isfinite(a) & ~finite & reached).sum())
        if leaked or lost:
            return f"{leaked} elements not finite that should be, {lost} finite that should not be, of {a.numel()}"
        untouched = finite & ~reached
        if nan and bool(untouched.any()):
            scale, off = float(b[untouched].abs().max()), float((a - b)[untouched].abs().max())
            if off > 16 * torch.finfo(case.dtype).eps * scale:
                return f"elements that do not depend on it are off by {off:.3g} of {scale:.3g}"
    return ""


def _words(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return str(error) if isinstance(error, (PilotageError, BadInput)) else f"{type(error).__name__}: {first}"
