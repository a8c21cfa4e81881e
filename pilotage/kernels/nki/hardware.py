"""What a NeuronCore has room for, by generation.

Source: the public architecture guides of Trainium 1, 2 and 3 and the tile-size page of the NKI reference. The target is
read from NEURON_PLATFORM_TARGET_OVERRIDE, as there; unset, it is Trainium 2.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum

from pilotage.core.errors import ConfigError

PARTITIONS = 128
PSUM_BANKS = 8
PSUM_BANK_BYTES = 2048
PSUM_BYTES = PSUM_BANKS * PSUM_BANK_BYTES
STATIONARY_FREE = 128
MOVING_FREE = 512
BN_STATS_FREE = 512
DVE_SEARCH_MIN, DVE_SEARCH_MAX = 8, 16384  # elements a partition that max8 and its relatives read
VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"


class nc_version(Enum):
    """Generation of the NeuronCore."""

    gen2 = 2
    gen3 = 3
    gen4 = 4

    def __lt__(self, other: nc_version) -> bool:
        return self.value < other.value

    def __le__(self, other: nc_version) -> bool:
        return self.value <= other.value

    def __gt__(self, other: nc_version) -> bool:
        return self.value > other.value

    def __ge__(self, other: nc_version) -> bool:
        return self.value >= other.value


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Capacities of one NeuronCore. `sbuf_bytes` is a partition's."""

    version: nc_version
    sbuf_bytes: int
    name: str


_GENERATIONS = {
    "trn1": Generation(version=nc_version.gen2, sbuf_bytes=192 * 1024, name="trn1"),
    "trn2": Generation(version=nc_version.gen3, sbuf_bytes=224 * 1024, name="trn2"),
    "trn3": Generation(version=nc_version.gen4, sbuf_bytes=256 * 1024, name="trn3"),
}
_ALIASES = {"inf2": "trn1", "gen2": "trn1", "gen3": "trn2", "gen4": "trn3"}


def target() -> Generation:
    """Give the generation that the interpreter stands for."""
    asked = os.environ.get(VARIABLE, "trn2").lower() or "trn2"
    name = _ALIASES.get(asked, asked)
    if name not in _GENERATIONS:
        raise ConfigError(f"no such target: {asked!r}", where=VARIABLE, do="use trn1, trn2 or trn3")
    return _GENERATIONS[name]


def precise() -> bool:
    """Tell whether low-precision values are held at their own precision (the default) or in float32."""
    return os.environ.get("NKI_PRECISE_FP", "1").lower() not in ("0", "false", "off")
