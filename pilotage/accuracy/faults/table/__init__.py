"""The table of planted faults."""

from pilotage.accuracy.faults.fault import Fault
from pilotage.accuracy.faults.table import (
    attention,
    cache,
    latent,
    layers,
    masks,
    moe,
    ranks,
    rope,
    shared_keys,
    speculation,
    tokens,
    training,
    weights,
)

# What the catalogue of public porting faults has and this table has not, and why.
NOT_COVERED = {
    "Context parallelism": "no model is trained that way here",
}
_PARTS = (
    *(tokens, layers, rope, attention, masks, latent, shared_keys),
    *(moe, weights, cache, ranks, speculation, training),
)
FAULTS: tuple[Fault, ...] = tuple(fault for part in _PARTS for fault in part.FAULTS)
BY_ID: dict[str, Fault] = {fault.id: fault for fault in FAULTS}
