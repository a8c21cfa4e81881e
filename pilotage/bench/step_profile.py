"""Where a step's time goes: `python -m pilotage.bench.step_profile`, asked through `bench.child`.

An engine in this process, so that its parts can be timed: the scheduler, the runner, each graph, the sampler. The
operators inside a graph are timed by torch's profiler in further steps of the same kind.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pilotage.bench.child import serve

WARM_STEPS = 3  # steps that are not counted: caches fill, the allocator settles
_WEIGHT_AT = {
    "pilotage::native_linear": 1,
    "pilotage::native_likely_linear": 1,
    "aten::mm": 1,
    "aten::addmm": 2,
    "mkldnn::_linear_pointwise": 1,
}
FUSED = "norms, rope, activations, residuals (fused) and graph overhead"


class Stopwatch:
    """Seconds spent in wrapped methods, step by step.

    Attributes:
        steps: for each call of the outermost method, seconds by name; inner methods called several times are summed.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._now: dict[str, float] = defaultdict(float)
        self._undo: list[Callable[[], None]] = []

    def watch(self, owner: Any, method: str, name: str | Callable[..., str], *, ends_step: bool = False) -> None:
        """Time `owner.method`; `name` may depend on its arguments. With `ends_step` it is the outermost one."""
        original = getattr(owner, method)
        own = method in vars(owner)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                label = name if isinstance(name, str) else name(*args, **kwargs)
                self._now[label] += time.perf_counter() - start
                if ends_step:
                    self.steps.append(dict(self._now))
                    self._now.clear()

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
        shapes: of its arguments, in order.
        sizes: part -> shape of its weight, [out, in].
    """
    if "attention" in name or "sdpa" in name:
        return "attention"
    if "write_kv" in name:
        return "KV cache writes"
    if "native_mlp" in name:
        return "MLP"
    # Where each operator takes its weight: an activation may happen to have the shape of another layer's weight.
    at = _WEIGHT_AT.get(name)
    if at is None:
        return None
    weight = list(shapes[at]) if len(shapes) > at else []
    for part, size in sizes.items():
        if weight in (size, size[::-1]):
            return part
    return "other products"


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
        """Run the load and return [{"part", "ms", "share"}] of one decode step, or of the prefill if one token is
        wanted; the parts add up to the engine's whole step.
        """
        kind = "decode" if output_len > 1 else "prefill"
        watch = Stopwatch()
        watch.watch(self.core, "step_fn", "step", ends_step=True)
        watch.watch(self.runner, "execute_model", "execute")
        watch.watch(self.runner, "sample_tokens", "sample")
        watch.watch(self.runner.graphs, "run", lambda inputs: f"graph {inputs.kind}")
        try:
            for seed in (1,) if kind == "decode" else (1, 2, 3, 4):  # a prompt is a single step, and the first warms up
                self._run(input_len, output_len, sequences, seed=seed)
        finally:
            watch.stop()
        steps = [step for step in watch.steps if {name for name in step if "graph" in name} == {f"graph {kind}"}]
        counted = steps[WARM_STEPS if len(steps) > 2 * WARM_STEPS else 1 :]
        ms = {
            name: statistics.median(step.get(name, 0.0) for step in counted) * 1e3
            for name in ("step", "execute", "sample", f"graph {kind}")
        }
        graph = ms[f"graph {kind}"]
        rows = {
            **{part: share * graph for part, share in self._operators(kind, input_len, output_len, sequences).items()},
            "inputs of the graph": max(0.0, ms["execute"] - graph),
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

    def _operators(self, kind: str, input_len: int, output_len: int, sequences: int) -> dict[str, float]:
        """Share of a graph's time in each kind of operator, and between them."""
        from torch.profiler import ProfilerActivity, profile

        sizes = weight_sizes(self.worker.model)
        runs = 0
        run = self.runner.graphs.run
        seconds: list[float] = []
        totals: dict[str, float] = defaultdict(float)

        def profiled(inputs: Any) -> Any:
            nonlocal runs
            if inputs.kind != kind or runs >= 8:
                return run(inputs)
            runs += 1
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
                start = time.perf_counter()
                result = run(inputs)
                seconds.append(time.perf_counter() - start)
            for event in trace.key_averages(group_by_input_shape=True):
                part = classify(event.key, list(event.input_shapes or []), sizes)
                if part is not None:
                    totals["MLP" if part == "MLP down" else part] += event.self_cpu_time_total / 1e6
            return result

        self.runner.graphs.run = profiled
        try:
            self._run(input_len, min(output_len, 12), sequences, seed=9)
        finally:
            del self.runner.graphs.run
        whole = max(sum(seconds), sum(totals.values()))
        return {**{part: total / whole for part, total in totals.items()}, FUSED: 1 - sum(totals.values()) / whole}


@contextlib.contextmanager
def profiler(checkpoint: Path) -> Iterator[Profiler]:
    """Start the engine with the settings that the server has."""
    from pilotage.serving import settings
    from pilotage.serving.launch import engine

    # A prompt must be computed even if an earlier one began like it.
    with engine(checkpoint, **settings.shared(checkpoint), enable_prefix_caching=False) as llm:
        yield Profiler(llm)


def main() -> None:
    """Start the engine, then answer `{"loads": [{"name", "input_len", "output_len", "concurrency"}]}`."""
    with profiler(Path(sys.argv[1])) as found:

        def answer(question: dict[str, Any]) -> dict[str, Any]:
            rows = []
            for load in question["loads"]:
                parts = found.parts(
                    input_len=load["input_len"], output_len=load["output_len"], sequences=load["concurrency"]
                )
                rows += [{"load": load["name"], **part} for part in parts]
            return {"rows": rows}

        serve(answer)


if __name__ == "__main__":
    main()
