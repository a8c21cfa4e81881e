"""`neuronxcc.nki.compiler`: the allocators of NKI 0.1. Here every tensor has its own memory, so they only say where."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from pilotage.kernels.nki.memory import MemoryRegion


class _Placed:
    def __init__(self, where: MemoryRegion) -> None:
        self.region = where


def _allocators(where: MemoryRegion) -> SimpleNamespace:
    def place(*args: Any, **kwargs: Any) -> _Placed:
        return _Placed(where)

    return SimpleNamespace(alloc=place, mod_alloc=place, auto_alloc=place)


sbuf, psum = _allocators(MemoryRegion.sbuf), _allocators(MemoryRegion.psum)


def _same(function: Any = None, **options: Any) -> Any:
    return function if function is not None else _same


skip_middle_end_transformations = enable_stack_allocator = force_auto_alloc = _same


@contextlib.contextmanager
def no_reorder() -> Iterator[None]:
    """Keep the order of what is inside."""
    yield
