"""Operators for the CPU in C++: AVX-512 and its bf16 products where the machine has them, narrower vectors elsewhere.

They are compiled where they run, once, with the machine's own compiler, and kept under `store.home()`. Where that is
not possible `unavailable()` says why, and plain torch runs instead.
"""

from pilotage.kernels.cpu.build import has_bf16_products, unavailable

__all__ = ["has_bf16_products", "unavailable"]
