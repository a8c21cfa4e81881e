"""What is running: the launch (shared by its cores) and the core of this thread."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pilotage.kernels.nki.cost import Ledger
from pilotage.kernels.nki.hardware import PARTITIONS, Generation, target

RENDEZVOUS_S = 120.0  # a partner that has not come by then never will


class Rendezvous:
    """A meeting of both cores under a key: each leaves something, all get everything."""

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._condition = threading.Condition()
        self._left: dict[Any, dict[int, Any]] = {}
        self._taken: dict[Any, int] = {}
        self._broken: BaseException | None = None

    def abort(self, cause: BaseException) -> None:
        """Wake everybody who waits for a core that failed."""
        with self._condition:
            self._broken = self._broken or cause
            self._condition.notify_all()

    def meet(self, key: Any, core: int, offering: Any) -> dict[int, Any]:
        """Leave `offering` and wait for the other cores; a key is free again when all have taken theirs."""
        with self._condition:
            while core in self._left.get(key, {}):  # the previous meeting is not over for everybody
                self._wait(key)
            table = self._left.setdefault(key, {})
            table[core] = offering
            self._condition.notify_all()
            while len(table) < self._cores:
                self._wait(key)
            self._taken[key] = self._taken.get(key, 0) + 1
            if self._taken[key] == self._cores:
                del self._left[key], self._taken[key]
                self._condition.notify_all()
            return table

    def _wait(self, key: Any) -> None:
        if self._broken is None and not self._condition.wait(RENDEZVOUS_S):
            raise TimeoutError(f"the other core never came to {key!r}")
        if self._broken is not None:
            raise RuntimeError("the other core failed") from self._broken


@dataclass
class Launch:
    """One call of a kernel: its grid, its generation of hardware, and whether it was written for NKI 0.1."""

    grid: tuple[int, ...] = ()
    legacy: bool = False
    generation: Generation = field(default_factory=target)

    def __post_init__(self) -> None:
        self.cores = int(np.prod(self.grid)) if self.grid else 1
        self.rendezvous = Rendezvous(self.cores)
        self.shared: dict[Any, Any] = {}  # the shared HBM tensors, by name or by order, that all cores make together
        self.baton = threading.Lock()  # cores take turns: a run is the same every time, barriers apart

    def meet(self, key: Any, core: int, offering: Any) -> dict[int, Any]:
        """Let the other core run until it comes to the same place."""
        self.baton.release()
        try:
            return self.rendezvous.meet(key, core, offering)
        finally:
            self.baton.acquire()


class Core:
    """One NeuronCore: its place in the grid, the accumulators of its engines, its random state and its ledger."""

    def __init__(self, launch: Launch, index: int) -> None:
        self.launch = launch
        self.index = index
        self.place = tuple(int(one) for one in np.unravel_index(index, launch.grid)) if launch.grid else ()
        self.ledger = Ledger()
        self.vector_registers = np.full(PARTITIONS, np.nan, np.float32)
        self.scalar_registers = np.full(PARTITIONS, np.nan, np.float32)
        self.random = np.random.default_rng(0)
        self.shared_made = 0


_here = threading.local()


def core() -> Core:
    """Give the core of this thread; outside of any kernel, one that belongs to the thread."""
    found: Core | None = getattr(_here, "core", None)
    if found is None:
        found = _here.core = Core(Launch(), 0)
    return found


class running:
    """Make `core` the core of this thread inside the block."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def __enter__(self) -> Core:
        self._before = getattr(_here, "core", None)
        _here.core = self._core
        return self._core

    def __exit__(self, *exc: object) -> None:
        _here.core = self._before


def in_kernel() -> bool:
    """Tell whether this thread is inside a kernel."""
    return getattr(_here, "depth", 0) > 0


def enter() -> None:
    """Count one kernel more on this thread's stack."""
    _here.depth = getattr(_here, "depth", 0) + 1


def leave() -> None:
    """Count one kernel fewer."""
    _here.depth -= 1
