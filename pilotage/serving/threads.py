"""CPU threads: every rank gets its share of the cores this process may use.

The engine computes while the server's own process answers requests; on two cores both still gain more from two compute
threads than from leaving one idle.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

_COUNT = "PILOTAGE_NUM_THREADS"  # how the count reaches the workers; may also be set by the user
_OURS = "PILOTAGE_NUM_THREADS_CHOSEN"  # marks a count that was chosen here, not stated by the user


def per_rank(cores: int, world_size: int) -> int:
    """Return the number of compute threads of one rank."""
    return max(1, cores // world_size)


def set_environment(world_size: int, environment: MutableMapping[str, str] = os.environ) -> int:
    """Fix the thread count of the worker processes; returns it.

    The user's `PILOTAGE_NUM_THREADS`, then `OMP_NUM_THREADS`, is followed. Without either each rank gets its share of
    the available cores, and `OMP_NUM_THREADS` says so to vLLM, which would otherwise choose for itself.
    """
    stated = None
    if environment.get(_OURS) != "1":
        stated = environment.get(_COUNT) or environment.get("OMP_NUM_THREADS")
    if stated is not None:
        environment[_COUNT] = stated
        return int(stated)
    count = per_rank(len(os.sched_getaffinity(0)), world_size)
    environment.update({_OURS: "1", _COUNT: str(count), "OMP_NUM_THREADS": str(count)})
    return count


def apply() -> int:
    """Set the calling worker's thread count; returns it."""
    import torch

    count = int(os.environ.get(_COUNT) or torch.get_num_threads())
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
    return count
