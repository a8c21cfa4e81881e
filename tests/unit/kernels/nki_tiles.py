"""Tiles for the tests of the NKI interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np

from pilotage.kernels.nki import language as nl
from pilotage.kernels.nki.tensor import NkiTensor


def tile(values: Any, dtype: Any = nl.float32, buffer: Any = nl.sbuf) -> NkiTensor:
    """Make a tile of values."""
    array = np.asarray(values)
    out = nl.ndarray(array.shape, dtype, buffer)
    out.write(array)
    return out


def hbm(values: Any, dtype: Any = nl.float32) -> NkiTensor:
    """Make a tensor in HBM of values."""
    return tile(values, dtype, nl.private_hbm)


def got(tensor: NkiTensor) -> list[Any]:
    """Give what a tensor holds, as lists."""
    return tensor.read().astype(np.float64).tolist()
