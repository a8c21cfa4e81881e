"""Kernels: wrap one of your own, find one, check it without the hardware; and the ones that pilotage brings.

`wrap_kernel` and `wrap_nki` put a kernel into a model's graph. The other tools are verbs of `pilotage kernels`.
"""

from pilotage.kernels.launch import launch_nki, launch_numpy, launch_torch
from pilotage.kernels.sharding import Sharding
from pilotage.kernels.wrap import WrappedKernel, wrap_kernel, wrap_nki

__all__ = ["Sharding", "WrappedKernel", "launch_nki", "launch_numpy", "launch_torch", "wrap_kernel", "wrap_nki"]
