"""Mean and variance on the vector engine."""

from __future__ import annotations

from typing import Any

import numpy as np

from pilotage.kernels.nki import session
from pilotage.kernels.nki.faults import fault
from pilotage.kernels.nki.hardware import BN_STATS_FREE
from pilotage.kernels.nki.isa import checks
from pilotage.kernels.nki.operators import quiet


def bn_stats(dst: Any, data: Any, dtype: Any = None, name: Any = None) -> None:
    """Write (count, mean, variance times count) of the even and of the odd elements of each partition."""
    dst, data = checks.tile("bn_stats", "dst", dst), checks.tile("bn_stats", "data", data)
    if data.per_partition > BN_STATS_FREE:
        fault(f"bn_stats over {data.per_partition} elements a partition, of at most {BN_STATS_FREE}", do="tile them")
    if dst.shape[0] != data.shape[0] or dst.per_partition != 6:
        fault(f"bn_stats writes 6 elements a partition, dst is {dst.shape}")
    values = data.read32().reshape(data.shape[0], -1)
    columns = []
    for part in (values[:, 0::2], values[:, 1::2]):
        count = part.shape[1]
        mean = part.mean(1) if count else np.zeros(len(values), np.float32)
        spread = ((part - mean[:, None]) ** 2).sum(1) if count else np.zeros(len(values), np.float32)
        columns += [np.full(len(values), count, np.float32), mean, spread]
    dst.write(np.stack(columns, 1).astype(np.float32).reshape(dst.shape))
    session.core().ledger.compute("vector", "bn_stats", data.per_partition)


def bn_aggr(dst: Any, data: Any, dtype: Any = None, name: Any = None) -> None:
    """Join (count, mean, variance times count) triples of each partition into its mean and variance."""
    dst, data = checks.tile("bn_aggr", "dst", dst), checks.tile("bn_aggr", "data", data)
    if data.per_partition % 3 or dst.shape[0] != data.shape[0] or dst.per_partition != 2:
        fault(f"bn_aggr of {data.shape} into {dst.shape}", do="give triples, and 2 elements a partition for the result")
    triples = data.read32().reshape(data.shape[0], -1, 3)
    count, mean, spread = triples[..., 0], triples[..., 1], triples[..., 2]
    total = count.sum(1)
    with quiet():
        joint = (count * mean).sum(1) / total
        variance = (spread.sum(1) + (count * (mean - joint[:, None]) ** 2).sum(1)) / total
    dst.write(np.stack([joint, variance], 1).reshape(dst.shape))
    session.core().ledger.compute("vector", "bn_aggr", data.per_partition)
