"""The guide's path of `wrap_nki`."""

from pilotage.kernels.wrap import wrap_nki

__all__ = ["wrap_nki"]
