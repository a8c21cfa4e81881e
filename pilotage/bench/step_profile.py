"""Where a step's time goes: `python -m pilotage.bench.step_profile`, asked through `bench.child`.

An engine in this process, so that its parts can be timed: the scheduler, the runner, each graph, the sampler. The
operators inside a graph are timed by torch's profiler in further steps of the same kind.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pilotage.bench.child import serve

WARM_STEPS = 3  # steps that are not counted: caches fill, the allocator settles
FUSED = "norms, rope, activations, residuals (fused) and graph overhead"


class Stopwatch:
    """Seconds spent in wrapped methods, one entry a call."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._undo: list[Callable[[], None]] = []

    def watch(self, owner: Any, method: str, name: str | Callable[..., str]) -> None:
        """Time `owner.method`; `name` may depend on its arguments."""
        original = getattr(owner, method)
        own = method in vars(owner)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                label = name if isinstance(name, str) else name(*args, **kwargs)
                self.seconds[label].append(time.perf_counter() - start)

        setattr(owner, method, timed)
        self._undo.append(lambda: setattr(owner, method, original) if own else delattr(owner, method))

    def stop(self) -> None:
        """Put the methods back."""
        for undo in self._undo:
            undo()
        self._undo.clear()


def classify(name: str, shapes: Sequence[Any], sizes: dict[str, list[int]]) -> str | None:
    """Name the part of the model that an operator call belongs to; None for one that computes nothing by itself.

    Args:
        name: of the operator, e.g. "pilotage::native_linear".
        shapes: of its tensor arguments.
        sizes: part -> shape of its weight, [out, in].
    """
    if "attention" in name or "sdpa" in name:
        return "attention"
    if "write_kv" in name:
        return "KV cache writes"
    if "linear" in name or name in ("aten::mm", "aten::addmm"):
        for part, (rows, columns) in sizes.items():
            if [rows, columns] in shapes or [columns, rows] in shapes:
                return part
        return "other products"
    return None


def weight_sizes(model: Any) -> dict[str, list[int]]:
    """Return part -> [out, in] of the products of one layer and the head, as they are computed."""
    layer = model.model.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    width = attention.q_proj.weight.shape[1]
    qkv = sum(part.weight.shape[0] for part in (attention.q_proj, attention.k_proj, attention.v_proj))
    return {
        "head": list(model.lm_head.weight.shape),
        "q, k, v projection": [qkv, width],
        "attention output projection": list(attention.o_proj.weight.shape),
        "MLP": [mlp.gate_proj.weight.shape[0] + mlp.up_proj.weight.shape[0], width],
        "MLP down": list(mlp.down_proj.weight.shape),
    }


class Profiler:
    """An engine whose steps can be taken apart."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.worker = self.core.model_executor.driver_worker.worker
        self.runner = self.worker.runner

    def parts(self, *, input_len: int, output_len: int, sequences: int) -> list[dict[str, Any]]:
        """Run the load twice and return [{"part", "ms", "share"}] of one decode step, or of the prefill if one token
        is wanted; the parts add up to the engine's whole step.
        """
        kind = "decode" if output_len > 1 else "prefill"
        watch = Stopwatch()
        watch.watch(self.core, "step_fn", "step")
        watch.watch(self.core.scheduler, "schedule", "schedule")
        watch.watch(self.core.scheduler, "update_from_output", "update")
        watch.watch(self.runner, "execute_model", "execute")
        watch.watch(self.runner, "sample_tokens", "sample")
        watch.watch(self.runner.graphs, "run", lambda inputs: f"graph {inputs.kind}")
        try:
            self._run(input_len, output_len, sequences, seed=1)
            if kind == "prefill":  # a single step a run: the first is the warm-up
                for seed in (2, 3):
                    self._run(input_len, output_len, sequences, seed=seed)
        finally:
            watch.stop()
        ms = self._of_kind(watch.seconds, kind)
        inside = self._operators(kind, input_len, output_len, sequences)
        inside[FUSED] = max(0.0, ms["graph"] - sum(inside.values()))
        rows = {
            **inside,
            "inputs of the graph": max(0.0, ms["execute"] - ms["graph"]),
            "sampling": ms["sample"],
            "scheduler and engine loop": max(0.0, ms["step"] - ms["execute"] - ms["sample"]),
        }
        total = sum(rows.values())
        return [
            {"part": part, "ms": value, "share": value / total}
            for part, value in sorted(rows.items(), key=lambda item: -item[1])
        ]

    def _run(self, input_len: int, output_len: int, sequences: int, *, seed: int) -> None:
        from pilotage.serving.greedy import greedy

        vocab = self.runner.vocab_size
        prompts = [
            [(7919 * seed + 104729 * row + 31 * at) % (vocab - 10) + 5 for at in range(input_len)]
            for row in range(sequences)
        ]
        greedy(self.llm, prompts, new_tokens=output_len, detokenize=False, ignore_eos=True)

    @staticmethod
    def _of_kind(seconds: dict[str, list[float]], kind: str) -> dict[str, float]:
        """Median milliseconds of the steps of one kind; prefill steps come first in a run."""
        graph = seconds[f"graph {kind}"]
        skip = WARM_STEPS if kind == "decode" and len(graph) > 2 * WARM_STEPS else 1
        out = {"graph": statistics.median(graph[skip:]) * 1e3}
        for name in ("step", "execute", "sample"):
            # Steps that sampled nothing or were cut short at the end stand apart from those of this kind.
            values = seconds[name][-len(graph) :] if kind == "decode" else seconds[name]
            out[name] = statistics.median(values[skip:]) * 1e3
        return out

    def _operators(self, kind: str, input_len: int, output_len: int, sequences: int) -> dict[str, float]:
        """Milliseconds a graph run spends in each kind of operator."""
        from torch.profiler import ProfilerActivity, profile

        sizes = weight_sizes(self.worker.model)
        runs = 0
        run = self.runner.graphs.run
        totals: dict[str, float] = defaultdict(float)

        def profiled(inputs: Any) -> Any:
            nonlocal runs
            if inputs.kind != kind or runs >= 8:
                return run(inputs)
            runs += 1
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
                result = run(inputs)
            for event in trace.key_averages(group_by_input_shape=True):
                part = classify(event.key, list(event.input_shapes or []), sizes)
                if part is not None:
                    totals["MLP" if part == "MLP down" else part] += event.self_cpu_time_total / 1e3
            return result

        self.runner.graphs.run = profiled
        try:
            self._run(input_len, min(output_len, 12), sequences, seed=9)
        finally:
            del self.runner.graphs.run
        return {part: total / runs for part, total in totals.items()}


@contextlib.contextmanager
def profiler(checkpoint: Path) -> Iterator[Profiler]:
    """Start the engine with the settings that the server has."""
    from pilotage.serving import settings
    from pilotage.serving.launch import engine

    # A prompt must be computed even if an earlier one began like it.
    with engine(checkpoint, **settings.shared(checkpoint), enable_prefix_caching=False) as llm:
        yield Profiler(llm)


def main() -> None:
    """Answer `{"checkpoint", "loads": [{"name", "input_len", "output_len", "concurrency"}]}`."""

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        rows = []
        with profiler(Path(question["checkpoint"])) as found:
            for load in question["loads"]:
                parts = found.parts(
                    input_len=load["input_len"], output_len=load["output_len"], sequences=load["concurrency"]
                )
                rows += [{"load": load["name"], **part} for part in parts]
        return {"rows": rows}

    serve(answer)


if __name__ == "__main__":
    main()
