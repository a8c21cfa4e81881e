"""The `nki`, `nl` and `nisa` that our own kernels are written against: the real packages, or the interpreter."""

from __future__ import annotations

import importlib
from typing import Any

from pilotage.kernels.nki import names

nl: Any
nisa: Any
jit: Any

if names.real("nki"):
    nl = importlib.import_module("nki.language")
    nisa = importlib.import_module("nki.isa")
    jit = importlib.import_module("nki").jit
else:
    from pilotage.kernels.nki import isa as nisa
    from pilotage.kernels.nki import language as nl
    from pilotage.kernels.nki.launch import jit

__all__ = ["jit", "nisa", "nl"]
