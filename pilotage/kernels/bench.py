"""`pilotage kernels bench`: the implementations that run here, timed side by side.

Every round times each implementation once, so that what else the machine does hits all of them; ratios are taken within
a round. A kernel in an interpreter is not timed: the number would say nothing about its device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pilotage.core.errors import ConfigError
from pilotage.core.targets import devices_of
from pilotage.functional import registry
from pilotage.functional.domain import Domain
from pilotage.functional.registry import DEFINITION, Implementation
from pilotage.kernels import cases
from pilotage.kernels.cases import Case

_ROUND_S = 0.01  # an implementation runs this long in a round, or once


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The times of one implementation.

    Attributes:
        microseconds: of a call, one number a round.
        ratio: time of the definition over its own, one number a round.
        refused: why it was not timed, or None.
    """

    implementation: str
    language: str
    microseconds: tuple[float, ...] = ()
    ratio: tuple[float, ...] = ()
    refused: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "implementation": self.implementation,
            "language": self.language,
            "refused": self.refused,
            "rounds": len(self.microseconds),
            "microseconds": spread(self.microseconds),
            "ratio": spread(self.ratio),
        }


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Return median, smallest and largest."""
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def bench(
    operator: str,
    *,
    dims: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    options: Mapping[str, Any] | None = None,
    optional: Sequence[str] = (),
    rounds: int = 15,
    device: str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> list[Timed]:
    """Time every implementation of an operator that takes a call.

    Args:
        operator: its name.
        dims, dtype, options, optional: of the call, see `cases.build`.
        rounds: times that each is measured.
        device: where.
        clock: returns seconds.

    Raises:
        ConfigError: no such operator, or less than one round.
    """
    if rounds < 1:
        raise ConfigError(f"{rounds} rounds", where="bench", do="measure at least one")
    case = cases.build(operator, dims, dtype, options=options, optional=optional, device=device)
    found = registry.implementations(operator)
    refused = {one.name: _refuses(one, case, device) for one in found}
    timed = [one for one in found if refused[one.name] is None]
    counts: dict[str, int] = {}
    times: dict[str, list[float]] = {one.name: [] for one in timed}
    with torch.no_grad():
        for one in timed:
            _seconds(one, case, 1, clock)  # compiles, allocates
            once = _seconds(one, case, 1, clock)
            counts[one.name] = max(1, min(10_000, int(_ROUND_S / max(once, 1e-7))))
        for at in range(rounds):
            for one in timed if at % 2 else timed[::-1]:
                times[one.name].append(_seconds(one, case, counts[one.name], clock))
    reference = times[DEFINITION]
    return [
        Timed(
            implementation=one.name,
            language=one.language,
            microseconds=tuple(value * 1e6 for value in times.get(one.name, ())),
            ratio=tuple(base / value for base, value in zip(reference, times.get(one.name, ()), strict=False)),
            refused=refused[one.name],
        )
        for one in found
    ]


def _refuses(one: Implementation, case: Case, device: str) -> str | None:
    domain = one.domain
    if isinstance(domain, Domain):
        devices = devices_of(domain.targets)
        if devices and device not in devices:
            return f"made for {' or '.join(domain.targets)}; in an interpreter nothing is timed"
        refusal = domain.judge(case.call, worth=False)
    else:
        refusal = one.judge(case.call)
    return None if refusal is None else refusal.words


def _seconds(one: Implementation, case: Case, count: int, clock: Callable[[], float]) -> float:
    args, kwargs = case.split(case.arguments)
    device = next((value.device.type for value in case.arguments.values() if isinstance(value, torch.Tensor)), "cpu")
    _wait(device)
    start = clock()
    for _ in range(count):
        one.function(*args, **kwargs)
    _wait(device)
    return (clock() - start) / count


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
