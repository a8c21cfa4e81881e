"""The enumerations of `nki.isa`, and which NeuronCore the interpreter stands for."""

from __future__ import annotations

from enum import Enum

from pilotage.kernels.nki import session
from pilotage.kernels.nki.hardware import nc_version


class engine(Enum):
    """The engines of a NeuronCore."""

    unknown = 0
    tensor = 1
    scalar = 2
    gpsimd = 3
    dma = 4
    vector = 5
    sync = 6


class reduce_cmd(Enum):
    """What an instruction does to the accumulators of its engine."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class dge_mode(Enum):
    """Who writes the descriptors of a transfer."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(Enum):
    """What happens to a run-time index that is out of range."""

    error = 0
    skip = 1


class matmul_perf_mode(Enum):
    """Performance modes of the tensor engine."""

    none = "none"
    double_row = "double_row"


class dma_engine(Enum):
    """Which DMA carries data between two cores."""

    dma = 1
    gpsimd_dma = 2


tensor_engine = engine.tensor
vector_engine = engine.vector
scalar_engine = engine.scalar
gpsimd_engine = engine.gpsimd
unknown_engine = engine.unknown


def get_nc_version() -> nc_version:
    """Give the generation that the kernel runs for."""
    return session.core().launch.generation.version


def get_nc_sub_version() -> int:
    """Give the revision of the silicon within its generation."""
    return 0
