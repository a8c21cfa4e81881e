"""An interpreter of the Neuron Kernel Interface, written from its public documentation.

    import pilotage.kernels.nki as pnki
    pnki.install()                       # `import nki` and `import neuronxcc.nki` work from here on
    nki.simulate(kernel)(a, b)           # or NKI_SIMULATOR=1 and kernel(a, b)

Where the real packages are installed they keep their names, and kernels go to them.
"""

from __future__ import annotations

from pilotage.kernels.nki import isa, language
from pilotage.kernels.nki.estimate import Estimate, estimate, summarise
from pilotage.kernels.nki.faults import NkiValidationError
from pilotage.kernels.nki.launch import Kernel, jit, simulate, simulating, watched
from pilotage.kernels.nki.names import install, real, uninstall

if simulating():
    install()

__all__ = [
    "Estimate",
    "Kernel",
    "NkiValidationError",
    "estimate",
    "install",
    "isa",
    "jit",
    "language",
    "real",
    "simulate",
    "simulating",
    "summarise",
    "uninstall",
    "watched",
]
