"""Measure a training step of a 100M-parameter Llama: our class in our engine against the classes of other projects.

    python scripts/measure_training.py --dtype float32 --rounds 12

These are Hugging Face's class and, where it is installed (docs/training.md says how), NeMo AutoModel's with its default
norm, which it compiles, and with torch's; each in a plain loop with the class's own loss and torch's clipping. All arms
live in one process, take the same batches and use the same fused AdamW. A round is one step of each, in an order that
rotates, so that whatever disturbs the machine disturbs all of them; times are compared round by round. Memory is
measured in processes of their own.
"""

from __future__ import annotations

import argparse
import importlib.util
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


def plain(model: Any) -> tuple[Step, int]:
    """Train someone else's class in a loop: its own loss, torch's clipping."""
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


def transformers_arm(dtype: torch.dtype) -> tuple[Step, int]:
    """Hugging Face's class."""
    from transformers import LlamaForCausalLM

    return plain(LlamaForCausalLM._from_config(config(), dtype=dtype).train())


def automodel_arm(rms_norm: str) -> Callable[[torch.dtype], tuple[Step, int]]:
    """NeMo AutoModel's class with one of its norms."""

    def build(dtype: torch.dtype) -> tuple[Step, int]:
        from nemo_automodel.components.models.common import BackendConfig
        from nemo_automodel.components.models.llama.model import LlamaForCausalLM

        backend = BackendConfig(attn="sdpa", linear="torch", rms_norm=rms_norm, rope_fusion=False)
        return plain(LlamaForCausalLM.from_config(config(), backend).to(dtype).train())

    return build


OURS = "pilotage"
ARMS: dict[str, Callable[[torch.dtype], tuple[Step, int]]] = {OURS: ours, "transformers": transformers_arm}
if importlib.util.find_spec("nemo_automodel") is not None:
    ARMS |= {"automodel": automodel_arm("torch_fp32"), "automodel, torch's norm": automodel_arm("torch")}


def measure(dtype: str, rounds: int, warm: int, limit: float) -> dict[str, Any]:
    """Time all arms in turn, for at most `limit` seconds."""
    ends = time.perf_counter() + limit
    built = {name: build(getattr(torch, dtype)) for name, build in ARMS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    worked: dict[str, list[float]] = {name: [] for name in ARMS}
    losses: dict[str, list[float]] = {name: [] for name in ARMS}
    names = list(ARMS)
    for number in range(warm + rounds):
        if time.perf_counter() > ends:
            rounds = number - warm
            break
        names = [*names[1:], names[0]] if number % 2 else names[::-1]
        for name in names:
            began, busy = time.perf_counter(), time.process_time()
            losses[name].append(built[name][0](number))
            if number >= warm:
                seconds[name].append(time.perf_counter() - began)
                worked[name].append(time.process_time() - busy)
    tokens = ROWS * LENGTH
    others = [name for name in ARMS if name != OURS]
    best = min(others, key=lambda name: statistics.median(seconds[name]))
    return {
        "dtype": dtype,
        "parameters": built[OURS][1],
        "tokens": tokens,
        "rounds": rounds,
        "best_of_the_others": best,
        "time": {name: ratio(seconds, name) for name in others},
        "processor_time": {name: ratio(worked, name) for name in others},
        "tokens_per_second": {name: tokens / statistics.median(values) for name, values in seconds.items()},
        "seconds": {name: [round(value, 4) for value in values] for name, values in seconds.items()},
        "largest_difference_of_losses": {
            name: max(abs(a - b) for a, b in zip(losses[OURS], losses[name], strict=True)) for name in others
        },
        "threads": torch.get_num_threads(),
    }


def ratio(values: dict[str, list[float]], other: str) -> dict[str, float]:
    """Return ours over another's: the median round and the geometric mean, each with its 95% interval.

    The median's interval assumes nothing of how rounds are distributed, and an interrupted step moves it by one rank.
    """
    from pilotage.accuracy.metrics import student_t_quantile

    logs = sorted(math.log(a / b) for a, b in zip(values[OURS], values[other], strict=True))
    outer = rank_outside(len(logs))
    half = student_t_quantile(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    mean = statistics.mean(logs)
    return {
        "median": math.exp(statistics.median(logs)),
        "median_low": math.exp(logs[outer]),
        "median_high": math.exp(logs[-1 - outer]),
        "mean": math.exp(mean),
        "mean_low": math.exp(mean - half),
        "mean_high": math.exp(mean + half),
    }


def rank_outside(n: int) -> int:
    """Return how many of n sorted values may lie outside a 95% interval of their median, at either end.

    That many or fewer values fall on one side of the true median with a probability of 2.5% at most.
    """
    outside, probability = 0, 0.0
    while probability + math.comb(n, outside) / 2**n <= 0.025:
        probability += math.comb(n, outside) / 2**n
        outside += 1
    return max(outside - 1, 0)


def peak(arm: str, dtype: str) -> int:
    """Run three steps of an arm in a process of its own; returns the bytes it held at most."""
    done = subprocess.run(
        [sys.executable, __file__, "--dtype", dtype, "--peak", arm], stdout=subprocess.PIPE, check=True, text=True
    )
    return int(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS", help="begin no round after this")
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
        print(json.dumps(measure(options.dtype, options.rounds, options.warm, options.limit), indent=2))


if __name__ == "__main__":
    main()
