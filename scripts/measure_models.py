"""Write the "Measured" table of every model's README from a run against transformers.

    .venv/bin/python scripts/measure_models.py            # all models, about a minute each on a busy machine
    .venv/bin/python scripts/measure_models.py qwen3

Everything is measured on the tiny perturbed checkpoints (`tiny:<name>`), three requests of 67, 6 and 33 tokens with a
window of 16, the last five tokens of each decoded one at a time.
"""

from __future__ import annotations

import platform
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

from pilotage.arch import tiny
from pilotage.core import store
from pilotage.models.common.paging import PagedSession

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "parity"))
from twins import NAMES, hf_logits, hf_model, our_model, paged_logits, prompts  # noqa: E402  a folder of tests

BEGIN, END = "<!-- measured -->", "<!-- /measured -->"
STREAMS = prompts((67, 6, 33))


def session(model: Any, **more: Any) -> PagedSession:
    return PagedSession(model=model, num_requests=4, max_tokens=96, **more)


def measure(name: str) -> list[tuple[str, str]]:
    """Measure one model: rows of what and result."""
    path = tiny.build(name)
    expected = torch.cat(hf_logits(hf_model(path), STREAMS))
    model = our_model(path)

    def fp32(**how: Any) -> str:
        got = torch.cat(paged_logits(session(model), STREAMS, **how))
        tokens = int((got.argmax(-1) != expected.argmax(-1)).sum())
        return f"{(got - expected).abs().max():.1e} (logits up to {expected.abs().max():.0f}), {tokens} tokens differ"

    rows = [
        ("fp32, packed prefill and decode: largest difference", fp32()),
        ("fp32, chunks of 13 with a cached prefix: largest difference", fp32(chunk=13)),
    ]
    baseline = torch.cat(hf_logits(hf_model(path, torch.bfloat16), STREAMS)).float()
    half = torch.cat(paged_logits(session(our_model(path, torch.bfloat16)), STREAMS)).float()
    errors = [(x - expected).square().mean().sqrt() for x in (half, baseline)]
    rows.append(
        ("bf16: RMS error over that of transformers in bf16, both against fp32", f"{errors[0] / errors[1]:.2f}")
    )
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    got = torch.cat(paged_logits(session(model, call=compiled), STREAMS, chunk=13, bucket=48))
    graphs = counters["stats"]["unique_graphs"]
    rows.append(
        (
            "inductor, fp32: largest difference; graphs for one prefill and one decode bucket",
            f"{(got - expected).abs().max():.1e}; {graphs}",
        )
    )
    return rows


def main(names: list[str]) -> None:
    for name in names:
        readme = ROOT / "pilotage" / "models" / name / "README.md"
        text = readme.read_text()
        head, rest = text.split(BEGIN)
        tail = rest.split(END)[1]
        lines = [f"| {what} | {result} |" for what, result in measure(name)]
        where = f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}"
        table = "\n".join(["| what | result |", "|---|---|", *lines, "", f"{date.today()}, {where}."])
        store.write_text(readme, f"{head}{BEGIN}\n{table}\n{END}{tail}")
        print(table)


if __name__ == "__main__":
    main(sys.argv[1:] or list(NAMES))
