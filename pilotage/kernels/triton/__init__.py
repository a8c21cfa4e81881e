"""Kernels in Triton, for CUDA devices; on the CPU in Triton's own interpreter, in fp32.

The interpreter keeps bf16 as 16-bit integers and computes wrongly with it, so it is refused there. It has to be
switched on, TRITON_INTERPRET=1, before anything imports triton. The kernels' modules import it, this one does not.
"""

from __future__ import annotations

import importlib.util
import sys

from pilotage.core.environment import switched_on

SWITCH = "TRITON_INTERPRET"


def interpreting() -> bool:
    """Tell whether Triton's interpreter is asked for."""
    return switched_on(SWITCH) is not None


def missing() -> str | None:
    """Return what this process lacks to run the kernels, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install 'pilotage[triton]'"
    loaded = sys.modules.get("triton.language")
    if interpreting() and loaded is not None and type(loaded.sum).__name__ != "InterpretedFunction":
        return f"{SWITCH} was set after triton was imported; set it before the process starts"
    return None


__all__ = ["SWITCH", "interpreting", "missing"]
