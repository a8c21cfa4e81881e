"""The table of planted faults."""

from pilotage.accuracy.faults.fault import Fault
from pilotage.accuracy.faults.table import attention, cache, layers, moe, ranks, rope, tokens, weights

# What the catalogue of public porting faults has that this version has no face for, and why.
NOT_COVERED = {
    "Training side": "this version serves and does not train: no gradient, optimiser or context-parallel fault exists",
    "Speculation": "this version does not speculate",
}
FAULTS: tuple[Fault, ...] = tuple(
    fault for module in (tokens, layers, rope, attention, moe, weights, cache, ranks) for fault in module.FAULTS
)
BY_ID: dict[str, Fault] = {fault.id: fault for fault in FAULTS}
