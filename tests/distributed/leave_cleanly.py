"""Train on four processes again and again, each leaving as an interpreter does: `leave_cleanly.py CHECKPOINT COUNT`.

The processes are forks of this one, which has imported everything, and end through its last line: torch's and gloo's
threads are taken down by the interpreter and not by `_exit`. Prints a line with the digests of each run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from training_ranks import global_batches, meshed_run

from pilotage.training import mesh

WORLD = 4


def load(path: Path) -> Any:
    from pilotage.models import registry

    return registry.training_class(["LlamaForCausalLM"]).from_pretrained(path, dtype=torch.float32)


def work(rank: int, port: int, path: Path, out: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(WORLD))
    mesh.start()
    model = load(path)
    found = meshed_run(model, mesh.Parallel(tp=2, dp=2), global_batches(model.config.vocab_size, steps=2))
    digest = hashlib.sha256()
    for name, value in sorted(found["weights"].items()):
        digest.update(name.encode() + value.numpy().tobytes())
    (out / str(rank)).write_text(digest.hexdigest())
    mesh.finish()


def main(path: Path, count: int) -> int:
    torch.set_num_threads(1)
    load(path)  # whatever is imported on the way is imported once
    out = Path(tempfile.mkdtemp())  # not a context: a child that leaves would take it along
    for _ in range(count):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = []
        for rank in range(WORLD):
            child = os.fork()
            if child == 0:
                work(rank, port, path, out)
                return 0
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        digests = {(out / str(rank)).read_text() for rank in range(WORLD)} if not any(codes) else set()
        print(codes, *digests, flush=True)
        if any(codes):
            return 1
    shutil.rmtree(out)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
