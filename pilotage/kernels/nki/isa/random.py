"""Random numbers. The bits are numpy's, not the hardware's: only their distribution is the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from pilotage.kernels.nki import session
from pilotage.kernels.nki.faults import fault
from pilotage.kernels.nki.hardware import nc_version
from pilotage.kernels.nki.isa import checks
from pilotage.kernels.nki.isa.constants import engine


def rng(dst: Any, engine: Any = engine.vector, name: Any = None) -> None:
    """Fill an integer tile with random bits."""
    dst = checks.tile("rng", "dst", dst)
    if not dst.dtype.is_integer:
        fault(f"rng into {dst.dtype!r}", do="use an integer type")
    bits = session.core().random.integers(0, 1 << 32, dst.shape, dtype=np.uint64)
    dst.array()[...] = bits.astype(dst.dtype.held)
    session.core().ledger.compute("vector", "rng", dst.per_partition)


def rand2(dst: Any, min: Any, max: Any, name: Any = None) -> None:
    """Fill a tile with values spread evenly over [min, max]."""
    checks.needs("rand2", nc_version.gen4)
    dst = checks.tile("rand2", "dst", dst)
    low, high = (checks.vector_or_scalar("rand2", label, one, dst) for label, one in (("min", min), ("max", max)))
    dst.write((low + (high - low) * session.core().random.random(dst.shape)).astype(np.float32))
    session.core().ledger.compute("vector", "rand2", dst.per_partition)


def dropout(dst: Any, data: Any, prob: Any, dtype: Any = None, name: Any = None) -> None:
    """Replace elements by zero with probability `prob`."""
    dst, data = checks.tile("dropout", "dst", dst), checks.tile("dropout", "data", data)
    checks.same_tile("dropout", dst, data=data)
    drop = session.core().random.random(data.shape) < checks.vector_or_scalar("dropout", "prob", prob, data)
    dst.write(checks.shaped(np.where(drop, np.float32(0), data.read32()), dst))
    session.core().ledger.compute("vector", "dropout", dst.per_partition)


def set_rng_seed(src_seeds: Any, name: Any = None) -> None:
    """Start the random sequence from a seed in a [1, 1] tile."""
    src_seeds = checks.tile("set_rng_seed", "src_seeds", src_seeds)
    if src_seeds.size != 1:
        fault(f"set_rng_seed: seed {src_seeds.shape}", do="give a [1, 1] tile")
    here = session.core()
    here.random = np.random.default_rng(int(src_seeds.read().reshape(-1)[0]) & 0xFFFFFFFF)


def rand_set_state(src_seeds: Any, engine: Any = engine.gpsimd, name: Any = None) -> None:
    """Refused: the hardware's generator cannot be reproduced from its state."""
    fault("rand_set_state: the state of the hardware's generator has no meaning here", do="use set_rng_seed")


def rand_get_state(dst: Any, engine: Any = engine.gpsimd, name: Any = None) -> None:
    """Refused: the hardware's generator cannot be reproduced from its state."""
    fault("rand_get_state: the state of the hardware's generator has no meaning here", do="use set_rng_seed")
