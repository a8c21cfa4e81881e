"""What faults are planted in: our model on its paged cache, on one rank in this process or on two in their own."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pilotage.accuracy.arms.tapped import Cached, Handed, PagedTapped, Request, Rows
from pilotage.accuracy.encoding import Encoder
from pilotage.core.errors import PilotageError
from pilotage.probe.discovery import SiteInfo

_TIMEOUT_S = 240.0


class ServedEncoder(Encoder):
    """The tokenizer on the served side; a class of its own, so that a fault can be planted in it."""

    def text(self, text: str) -> list[int]:
        """See `Encoder.text`."""
        return super().text(text)

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        """See `Encoder.chat`."""
        return super().chat(messages)


class Ranks:
    """Processes that form a tensor-parallel group and stay, one case after another; use it as a context manager."""

    def __init__(self, ranks: int = 2) -> None:
        import torch.multiprocessing as mp

        from pilotage.serving.launch import free_port

        context = mp.get_context("spawn")
        port = free_port()
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, ranks, port, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def ask(self, *message: Any) -> list[Any]:
        """Send a message to every rank and return their answers, by rank.

        Raises:
            PilotageError: a rank failed or did not answer; the processes are then gone.
        """
        for pipe in self.pipes:
            pipe.send_bytes(_packed(message))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            try:
                found = _unpacked(pipe.recv_bytes()) if pipe.poll(_TIMEOUT_S) else "no answer"
            except (EOFError, OSError):
                found = "the process ended"
            if isinstance(found, str):
                self.close()
                raise PilotageError(f"rank {rank}: {found}", where="tensor-parallel target")
            answers.append(found[0])
        return answers

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
        self.processes = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RankedTapped:
    """`PagedTapped` over tensor-parallel ranks: what is divided over them is cut and joined here.

    Args:
        ranks: the processes.
        fault: name of the fault planted in each, None for none.
        checkpoint, dtype, longest: see `PagedTapped`.
    """

    def __init__(self, ranks: Ranks, fault: str | None, checkpoint: Path, dtype: torch.dtype, longest: int) -> None:
        self.ranks, self.name = ranks, f"in {len(ranks.pipes)} ranks"
        # What is divided over the ranks, as the first of them says.
        self.known: dict[str, SiteInfo] = ranks.ask(
            "build", fault, str(checkpoint), str(dtype).removeprefix("torch."), longest
        )[0]

    def names(self, tokens: Sequence[int]) -> list[str]:
        """See `PagedTapped.names`."""
        return list(self.ranks.ask("names", list(tokens))[0])

    def observe(
        self, requests: Sequence[Request], sites: Sequence[str] | None = None, handed: Handed | None = None
    ) -> Rows:
        """See `PagedTapped.observe`."""
        found = self.ranks.ask("observe", list(requests), None if sites is None else list(sites), handed)
        joined: Rows = {}
        for site, rows in found[0].items():
            if site in self.known:
                rows = [self.known[site].join([part[site][r] for part in found]) for r in range(len(rows))]
            joined[site] = rows
        return joined

    def cached(self, requests: Sequence[Request], handed: Handed) -> dict[str, Cached]:
        """See `PagedTapped.cached`."""
        found = self.ranks.ask("cached", list(requests), handed)
        joined: dict[str, Cached] = {}
        for name, one in found[0].items():
            # Pages are divided as the keys are that go into them; latents, which are no keys, are whole on every rank.
            keys = self.known.get(f"{name}.k_rope", SiteInfo(name=name))
            joined[name] = Cached(
                first=one.first,
                keys=[keys.join([part[name].keys[r] for part in found]) for r in range(len(requests))],
                values=[keys.join([part[name].values[r] for part in found]) for r in range(len(requests))],
            )
        return joined


def _share(handed: Handed | None, known: Mapping[str, SiteInfo], rank: int, ranks: int) -> Handed | None:
    """Cut what is handed to one rank: its part of what is divided."""
    if handed is None:
        return None
    rows: Rows = {}
    for site, found in handed.rows.items():
        info = known.get(site)
        rows[site] = [x if info is None else info.share(x, rank, ranks) for x in found]
    return Handed(rows=rows, only=handed.only)


def _serve(rank: int, ranks: int, port: int, pipe: Any) -> None:
    import torch.distributed as dist

    from pilotage.accuracy.faults.fault import Patch
    from pilotage.accuracy.faults.table import BY_ID
    from pilotage.parallel import set_tp_group
    from pilotage.probe.discovery import describe

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    set_tp_group(dist.group.WORLD)
    patch, target = Patch(), None
    known: dict[str, SiteInfo] = {}
    while True:
        command, *arguments = _unpacked(pipe.recv_bytes())
        try:
            answer: Any = None
            if command == "build":
                fault, checkpoint, dtype, longest = arguments
                patch.__exit__(None, None, None)
                if fault is not None:
                    BY_ID[fault].plant(patch)
                target = PagedTapped(Path(checkpoint), getattr(torch, dtype), longest)
                answer = known = describe(target.model)
            elif command == "names":
                assert target is not None
                answer = target.names(*arguments)
            elif command == "cached":
                assert target is not None
                answer = target.cached(*arguments)
            else:
                assert target is not None
                requests, sites, handed = arguments
                answer = target.observe(requests, sites, _share(handed, known, rank, ranks))
        except Exception as error:  # whatever it is belongs to the process that asked
            pipe.send_bytes(_packed(f"{type(error).__name__}: {error}"))
            raise
        pipe.send_bytes(_packed((answer,)))


def _packed(message: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(message, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes) -> Any:
    # Written by this program a moment ago, in a process that it started.
    return torch.load(io.BytesIO(data), weights_only=False)


def rows_of(target: Any, requests: Sequence[Request]) -> Tensor:
    """Return a target's logits [rows, V] of all kept positions, fp32, one request after another."""
    return torch.cat([found.float() for found in target.observe(requests, ["logits"])["logits"]])
