"""Our modules on one rank in this process, or on several tensor-parallel ranks in processes of their own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pilotage.accuracy.arms.fallback import FallbackModules, has_package
from pilotage.accuracy.arms.module import Job, OurModules
from pilotage.core.errors import PilotageError, Unsupported


def answers(
    checkpoint: Path, dtype: torch.dtype, length: int, jobs: Sequence[Job], *, ranks: int
) -> list[Tensor | None]:
    """Return each job's output on the CPU; None where we have no such module.

    Args:
        checkpoint: directory.
        dtype: of weights and computation.
        length: tokens of the longest input.
        jobs: what is asked.
        ranks: tensor-parallel ranks.

    Raises:
        PilotageError: ranks do not agree, or one of them failed.
    """
    if not has_package(checkpoint):
        if ranks > 1:
            raise Unsupported(
                "it has no model package, and the fallback's modules are compared on one rank", where=str(checkpoint)
            )
        fallback = FallbackModules(checkpoint, dtype, length)
        return [fallback.answer(job) for job in jobs]
    if ranks == 1:
        ours = OurModules(checkpoint, dtype, length)
        return [ours.answer(job) for job in jobs]
    import torch.multiprocessing as multiprocessing

    from pilotage.serving.launch import free_port

    mp: Any = multiprocessing  # its names are exported by star
    with tempfile.TemporaryDirectory(prefix="pilotage-ranks-") as directory:
        out = Path(directory)
        try:
            mp.spawn(_rank, args=(ranks, free_port(), out, checkpoint, dtype, length, list(jobs)), nprocs=ranks)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            last = str(error).strip().splitlines()[-1]
            raise PilotageError(f"a rank failed: {last}", where=f"{ranks} ranks of {checkpoint}") from error
        found: list[list[Tensor | None]] = [torch.load(out / f"{rank}.pt", weights_only=True) for rank in range(ranks)]
    return [_joined(job, outputs) for job, *outputs in zip(jobs, *found, strict=True)]


def _joined(job: Job, outputs: Sequence[Tensor | None]) -> Tensor | None:
    """Return what all ranks agree on, or their shards of a projection's output side by side."""
    known = [output for output in outputs if output is not None]
    if not known:
        return None
    if len(known) == len(outputs):
        if all(torch.equal(output, known[0]) for output in known[1:]):
            return known[0]
        if job.kind == "linear":
            return torch.cat(known, dim=-1)
    raise PilotageError("ranks return different outputs", where=job.name)


def _rank(
    rank: int, ranks: int, port: int, out: Path, checkpoint: Path, dtype: torch.dtype, length: int, jobs: list[Job]
) -> None:
    import torch.distributed as dist

    from pilotage.parallel import set_tp_group

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    set_tp_group(dist.group.WORLD)
    try:
        ours = OurModules(checkpoint, dtype, length)
        torch.save([ours.answer(job) for job in jobs], out / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
