"""Measure a training step of a 100M-parameter Llama: our class in our engine against Hugging Face's in a plain loop.

    python scripts/measure_training.py --dtype float32 --pairs 12

Both arms live in one process, take the same batches and use the same fused AdamW; they take turns, and the one that
goes first alternates, so that whatever disturbs the machine disturbs both. The ratio of their times is taken step by
step. Memory is measured in processes of their own.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

ROWS, LENGTH = 1, 64
SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "use_cache": False,
}
LR, MAX_NORM = 3e-4, 1.0
Step = Callable[[int], float]


def batch(step: int) -> dict[str, torch.Tensor]:
    """Make a batch of two packed documents a row."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, SHAPE["vocab_size"], (ROWS, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).repeat(ROWS, 1)
    positions[:, LENGTH // 2 :] -= LENGTH // 2
    return {"input_ids": ids[:, :-1].clone(), "labels": ids[:, 1:].clone(), "position_ids": positions}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=0.1, betas=(0.9, 0.95), fused=True)


@torch.no_grad()
def fill(model: Any) -> None:
    """Give both arms the same weights."""
    generator = torch.Generator().manual_seed(0)
    for _, parameter in sorted(model.named_parameters()):
        if parameter.ndim > 1:
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))


def config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"])


def ours(dtype: torch.dtype) -> tuple[Step, int]:
    """Our class in our engine."""
    from pilotage.models import registry
    from pilotage.training.engine import Batch, Engine
    from pilotage.training.mesh import Mesh, Parallel

    model = registry.training_class(["LlamaForCausalLM"]).from_config(config(), dtype=dtype).train()
    fill(model)
    engine = Engine(model, Mesh(None), Parallel())
    optimizer = adamw(engine.parameters().values())

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = engine.forward_backward([Batch(**batch(number))])
        engine.clip(MAX_NORM)
        optimizer.step()
        return loss

    return step, sum(p.numel() for p in model.parameters())


def theirs(dtype: torch.dtype) -> tuple[Step, int]:
    """Hugging Face's class, its own loss, torch's clipping."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM._from_config(config(), dtype=dtype).train()
    fill(model)
    optimizer = adamw(model.parameters())

    def step(number: int) -> float:
        given = batch(number)
        optimizer.zero_grad()
        output = model(
            input_ids=given["input_ids"],
            position_ids=given["position_ids"],
            labels=given["labels"],
            shift_labels=given["labels"],
            use_cache=False,
        )
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        return float(output.loss.detach())

    return step, sum(p.numel() for p in model.parameters())


ARMS = {"pilotage": ours, "transformers": theirs}


def measure(dtype: str, pairs: int, warm: int, limit: float) -> dict[str, Any]:
    """Time both arms in turn, for at most `limit` seconds."""
    ends = time.perf_counter() + limit
    built = {name: build(getattr(torch, dtype)) for name, build in ARMS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    worked: dict[str, list[float]] = {name: [] for name in ARMS}
    losses: dict[str, list[float]] = {name: [] for name in ARMS}
    for number in range(warm + pairs):
        if time.perf_counter() > ends:
            pairs = number - warm
            break
        names = list(ARMS) if number % 2 else list(reversed(ARMS))
        for name in names:
            began, busy = time.perf_counter(), time.process_time()
            losses[name].append(built[name][0](number))
            if number >= warm:
                seconds[name].append(time.perf_counter() - began)
                worked[name].append(time.process_time() - busy)
    tokens = ROWS * LENGTH
    return {
        "dtype": dtype,
        "parameters": built["pilotage"][1],
        "tokens": tokens,
        "pairs": pairs,
        "time": ratio(seconds),
        "processor_time": ratio(worked),
        "tokens_per_second": {name: tokens / statistics.median(values) for name, values in seconds.items()},
        "seconds": {name: [round(value, 4) for value in values] for name, values in seconds.items()},
        "largest_difference_of_losses": max(abs(a - b) for a, b in zip(*losses.values(), strict=True)),
        "threads": torch.get_num_threads(),
    }


def ratio(values: dict[str, list[float]]) -> dict[str, float]:
    """Return ours over theirs, the geometric mean over the pairs with its 95% interval, and the median pair."""
    from pilotage.accuracy.metrics import student_t_quantile

    logs = [math.log(a / b) for a, b in zip(values["pilotage"], values["transformers"], strict=True)]
    half = student_t_quantile(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    mean = statistics.mean(logs)
    return {
        "ratio": math.exp(mean),
        "low": math.exp(mean - half),
        "high": math.exp(mean + half),
        "median": math.exp(statistics.median(logs)),
    }


def peak(arm: str, dtype: str) -> int:
    """Run three steps of an arm in a process of its own; returns the bytes it held at most."""
    done = subprocess.run(
        [sys.executable, __file__, "--dtype", dtype, "--peak", arm], stdout=subprocess.PIPE, check=True, text=True
    )
    return int(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS", help="begin no pair after this")
    parser.add_argument("--memory", action="store_true", help="measure peak memory instead of time")
    parser.add_argument("--peak", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        step, _ = ARMS[options.peak](getattr(torch, options.dtype))
        for number in range(3):
            step(number)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    elif options.memory:
        found = {name: peak(name, options.dtype) for name in ARMS}
        print(json.dumps({"dtype": options.dtype, "peak_bytes": found}, indent=2))
    else:
        print(json.dumps(measure(options.dtype, options.pairs, options.warm, options.limit), indent=2))


if __name__ == "__main__":
    main()
