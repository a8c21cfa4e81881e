"""Run a function in several real training processes, and the plain single-process run that they are held against."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.pipelining  # here once, and not in each process
import torch.multiprocessing as mp
import torch.nn.functional as F

from pilotage.training import engine, mesh

STEPS, MAX_NORM, LR = 5, 0.5, 1e-3


def run(function: Callable[..., Any], world_size: int, out: Path, *args: Any) -> list[Any]:
    """Call `function(rank, *args)` in `world_size` processes; returns what each returned, by rank.

    They are forks of this process, which has imported everything: an import of torch costs each seconds.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(_rank, (world_size, port, out, function, args), nprocs=world_size, start_method="fork")
    return [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(world_size)]


def _rank(rank: int, world: int, port: int, out: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    mesh.start()
    torch.save(function(rank, *args), out / f"rank{rank}.pt")
    mesh.finish()


def global_batches(vocab: int, steps: int = STEPS, rows: int = 8, length: int = 24) -> list[dict[str, torch.Tensor]]:
    """Make the same batches everywhere: packed documents of unequal lengths, some rows with few targets."""
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 + step)
        ids = torch.randint(4, vocab, (rows, length + 1), generator=generator)
        labels = ids[:, 1:].clone()
        positions = torch.arange(length).repeat(rows, 1)
        for row in range(rows):
            cut = int(torch.randint(5, length - 3, (1,), generator=generator))
            positions[row, cut:] -= cut
            labels[row, cut - 1] = -100
            labels[row, : 2 * row] = -100  # unequal counts over rows, hence over micro-batches and ranks
        found.append({"input_ids": ids[:, :-1].clone(), "labels": labels, "position_ids": positions})
    return found


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, foreach=False)


def plain_run(model: Any, batches: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Train one process by nothing but torch: each batch whole, its mean loss, torch's clipping, AdamW."""
    optimizer = optimizer_of(model.parameters())
    out: dict[str, Any] = {"losses": [], "norms": []}
    for step, batch in enumerate(batches):
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            out["gradients"] = {name: p.grad.clone() for name, p in model.named_parameters()}
        out["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        out["losses"].append(float(loss))
    out["weights"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return out


def meshed_run(model: Any, parallel: Any, batches: list[dict[str, torch.Tensor]], micro_rows: int = 2) -> Any:
    """Train the same through the engine; every rank returns what was gathered."""
    processes = mesh.make_mesh(parallel)
    trained = engine.Engine(model, processes, parallel)
    optimizer = optimizer_of(trained.parameters().values())
    out: dict[str, Any] = {"losses": [], "norms": [], "evaluated": []}
    for step, batch in enumerate(batches):
        own = {name: value.chunk(processes.dp)[processes.dp_rank] for name, value in batch.items()}
        count = own["input_ids"].shape[0] // micro_rows
        parts = [engine.Batch(**{name: value.chunk(count)[i] for name, value in own.items()}) for i in range(count)]
        out["evaluated"].append(trained.evaluate(parts)[0])
        optimizer.zero_grad()
        out["losses"].append(trained.forward_backward(parts))
        if step == 0:
            out["gradients"] = trained.gradients()
        out["norms"].append(trained.clip(MAX_NORM))
        optimizer.step()
    out["weights"] = trained.gathered({name: p.detach() for name, p in trained.parameters().items()})
    return out
