"""How much memory this process may still use, container limits included."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_CGROUP = Path("/sys/fs/cgroup")
_ENV = "PILOTAGE_MEMORY_BYTES"


def free_bytes(cgroup: Path = _CGROUP) -> int:
    """Return the bytes that are free on this machine, in this container, and under `PILOTAGE_MEMORY_BYTES`.

    The environment variable bounds what all pilotage processes on the machine may use together.
    """
    import psutil

    free = psutil.virtual_memory().available
    limit, used = _read(cgroup / "memory.max"), _read(cgroup / "memory.current")
    if limit is not None and used is not None:
        # The page cache counts as used but is given back on demand.
        free = min(free, max(limit - used + (_stat(cgroup / "memory.stat", "file") or 0), 0))
    stated = os.environ.get(_ENV)
    if stated:
        free = min(free, max(int(stated) - psutil.Process().memory_info().rss, 0))
    return free


def step_bytes(vllm_config: VllmConfig, tokens_per_req: int) -> int:
    """Return about what the largest step takes beside weights and cache, rather too much than too little.

    Counted are the rows between operators, in fp32 and as if a layer's were all alive at once, and four copies of the
    sampled rows' logits: the graph's, the sampler's in fp32, what it sorts, and their probabilities.

    Args:
        vllm_config: vLLM's configuration, its limits final.
        tokens_per_req: most tokens of a request in a decode graph.
    """
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    config = model.hf_text_config
    hidden = model.get_hidden_size()
    inner = max(getattr(config, "intermediate_size", 0) or 0, getattr(config, "moe_intermediate_size", 0) or 0)
    attention = getattr(config, "num_attention_heads", 1) * model.get_head_size()
    decode = scheduler.max_num_seqs * tokens_per_req
    rows = max(scheduler.max_num_batched_tokens, decode) * (12 * hidden + 4 * inner + 4 * attention)
    return 4 * (rows + 4 * decode * model.get_vocab_size())


def _read(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" means no limit


def _stat(path: Path, key: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[0] == key), None)
