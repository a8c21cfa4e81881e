"""Instructions between the two cores of a logical NeuronCore."""

from __future__ import annotations

from typing import Any

from pilotage.kernels.nki import session
from pilotage.kernels.nki.faults import fault
from pilotage.kernels.nki.hardware import nc_version
from pilotage.kernels.nki.isa import checks
from pilotage.kernels.nki.isa.constants import dma_engine, engine
from pilotage.kernels.nki.memory import MemoryRegion
from pilotage.kernels.nki.tensor import NkiTensor

_SBUF = (MemoryRegion.sbuf,)
_GPSIMD_LIMIT = {4: 1024, 2: 512, 1: 256}  # bytes a partition, by element size


def _partnered(what: str) -> session.Core:
    checks.needs(what, nc_version.gen3)
    here = session.core()
    if here.launch.cores != 2:
        fault(f"{what} in a kernel on {here.launch.cores} core", do="launch it as kernel[2]")
    return here


def core_barrier(data: Any = None, cores: Any = (0, 1), engine: Any = engine.gpsimd, name: Any = None) -> None:
    """Wait until the other core is here too."""
    here = _partnered("core_barrier")
    if tuple(cores) != (0, 1):
        fault(f"core_barrier of {tuple(cores)}", do="only (0, 1) is possible")
    if isinstance(data, NkiTensor) and data.buffer is not MemoryRegion.shared_hbm:
        fault(f"core_barrier on data in {data.buffer.value}", do="it guards data in shared HBM")
    here.launch.meet("barrier", here.index, None)
    here.ledger.instructions["core_barrier"] += 1


def sendrecv(
    src: Any,
    dst: Any,
    send_to_rank: Any,
    recv_from_rank: Any,
    pipe_id: Any = 0,
    dma_engine: Any = dma_engine.dma,
    name: Any = None,
    use_gpsimd_dma: Any = None,
) -> None:
    """Send a tile to the other core and receive one from it at the same time."""
    here = _partnered("sendrecv")
    src, dst = checks.tile("sendrecv", "src", src, where=_SBUF), checks.tile("sendrecv", "dst", dst, where=_SBUF)
    if src.shape != dst.shape or src.dtype != dst.dtype:
        fault(f"sendrecv from {src!r} to {dst!r}", do="shape and type must agree")
    if int(send_to_rank) not in (0, 1) or int(recv_from_rank) not in (0, 1):
        fault(f"sendrecv to {send_to_rank} from {recv_from_rank}", do="the ranks are 0 and 1")
    if use_gpsimd_dma or dma_engine is _GPSIMD:
        width, limit = src.per_partition * src.dtype.itemsize, _GPSIMD_LIMIT.get(src.dtype.itemsize, 0)
        if width > limit:
            fault(
                f"sendrecv by the GpSimd engine of {width} bytes a partition, of at most {limit}",
                do="use dma_engine.dma",
            )
    offering = (int(send_to_rank), src.read().copy())
    table = here.launch.meet(("pipe", int(pipe_id)), here.index, offering)
    addressee, values = table[int(recv_from_rank)]
    if addressee != here.index:
        fault(f"sendrecv: core {here.index} waits for core {recv_from_rank}, which sends to core {addressee}")
    if values.shape != dst.shape:
        fault(f"sendrecv: core {here.index} expects {dst.shape}, and {values.shape} came")
    dst.write(values)
    here.ledger.dma("sendrecv", dst.size * dst.dtype.itemsize, dst.shape[0], hbm=False)


_GPSIMD = dma_engine.gpsimd_dma
