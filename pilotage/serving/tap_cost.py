"""What recording costs: steps of the same compiled graphs with and without taps, turn by turn, in one process.

`python -m pilotage.serving.tap_cost MODEL` prints one JSON object a graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pilotage.probe.captures import CaptureWriter
from pilotage.serving.batch import Forward, StepInputs

CACHED = 100  # tokens that each decoding request has behind it


def measure(worker: Any, sites: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    """Time every graph of a worker; call it with `collective_rpc`.

    Args:
        worker: of the engine.
        sites: patterns of what is recorded.
        repeats: steps of each kind.

    Returns:
        For each graph the medians in ms without taps, with taps, and with taps whose rows are also written to disk,
        and the medians of the step-by-step ratios to the step without taps just before.
    """
    runner = worker.runner
    graphs, probing = runner.graphs, runner.probing
    with tempfile.TemporaryDirectory(prefix="pilotage-cost-") as directory:
        probing.capture_start(directory, sites)
        taps, writer = probing.taps, probing.writer
        assert taps is not None and writer is not None
        graphs.taps = taps
        graphs.prepare(list(graphs.inputs))
        graphs.taps = None
        graphs.prepare(list(graphs.inputs))
        found = []
        for inputs in graphs.inputs.values():
            forward = _fill(inputs)
            times = [_steps(runner, inputs, forward, taps, writer) for _ in range(repeats + 3)][3:]
            columns = list(zip(*times, strict=True))
            found.append(
                {
                    "graph": inputs.key.name,
                    "sites": len(taps.capture),
                    **{
                        f"{name}_ms": round(statistics.median(column) * 1e3, 3)
                        for name, column in zip(("plain", "tapped", "written"), columns, strict=True)
                    },
                    "tapped_ratio": round(statistics.median(t / p for p, t, _ in times), 4),
                    "written_ratio": round(statistics.median(w / p for p, _, w in times), 4),
                }
            )
        probing.capture_stop()
        graphs.taps = probing.taps
    return found


def _fill(inputs: StepInputs) -> Forward:
    """Make every token and row of a graph real: one long prompt, or requests that decode."""
    decode = inputs.kind == "decode"
    rows = inputs.key.size if decode else 1
    new = 1 if decode else inputs.size
    done = CACHED if decode else 0
    forward = Forward(kind=inputs.kind, rows=tuple(range(rows)), num_tokens=(new,) * rows)
    tables = []
    for group in inputs.groups:
        table = np.zeros((rows, group.max_blocks_per_seq), dtype=np.int32)
        needed = -(-(done + new) // group.block_size)
        table[:, :needed] = 1 + np.arange(rows * needed, dtype=np.int32).reshape(rows, needed)
        tables.append(table)
    inputs.fill(
        forward,
        token_ids=np.full((rows, done + new), 11, dtype=np.int32),
        num_computed=np.full(rows, done, dtype=np.int32),
        block_tables=tables,
    )
    return forward


def _steps(
    runner: Any, inputs: StepInputs, forward: Forward, taps: Any, writer: CaptureWriter
) -> tuple[float, float, float]:
    graphs, probing = runner.graphs, runner.probing
    ids = [f"r{row}" for row in forward.rows]
    states = {req_id: _State() for req_id in ids}
    graphs.taps = None
    start = time.perf_counter()
    graphs.run(inputs)
    plain = time.perf_counter() - start
    graphs.taps = taps
    start = time.perf_counter()
    graphs.run(inputs)
    tapped = time.perf_counter() - start
    start = time.perf_counter()
    graphs.run(inputs)
    probing.after(inputs, forward, ids, states)
    written = time.perf_counter() - start
    return plain, tapped, written


class _State:
    """The part of a request's state that recording reads."""

    prompt_token_ids: Sequence[int] = (11,)


def main() -> None:
    from pilotage.arch import source
    from pilotage.serving import launch, settings

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--sites", nargs="+", default=["model.layers.*"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=40)
    given = parser.parse_args()
    path = Path(source.resolve(given.model))
    with launch.engine(path, **settings.shared(path, given.dtype)) as llm:
        for row in llm.collective_rpc(measure, args=(given.sites, given.repeats))[0]:
            print(json.dumps(row))


if __name__ == "__main__":
    main()
