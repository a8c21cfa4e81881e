"""Every way to divide a model trains as one process does: loss, norm, each gradient, and weights after five steps.

The single process is plain torch on the whole batch: no engine, no micro-batches, torch's own clipping.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from training_ranks import STEPS, global_batches, meshed_run, plain_run, run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

TWO = [{"dp": 2}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}]
FOUR = [
    {"tp": 2, "dp": 2},
    {"tp": 2, "dp": 2, "sequence_parallel": True},
    {"pp": 2, "dp": 2},
    {"tp": 2, "pp": 2},
    {"tp": 2, "pp": 2, "sequence_parallel": True},
]
# Relative L2 of each gradient: fp32 sums in another order, through four to six layers. A gradient that is lost in part
# is off by tens of percent.
GRADIENT = 1e-5
# Of the change in five steps, all of a parameter together: Adam divides by gradients that may be near zero, and those
# of the keys' bias nearly cancel.
UPDATE, UPDATE_KEY_BIAS = 3e-3, 0.1
LOSS = 1e-5  # of losses near 8
NORM = 1e-5  # relative


def load(path: Path, implementation: str) -> Any:
    from transformers import AutoModelForCausalLM

    from pilotage.models import registry

    if implementation == "transformers":
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    names = json.loads((path / "config.json").read_text())["architectures"]
    return registry.training_class(names).from_pretrained(path, dtype=torch.float32)


def work(
    rank: int, paths: list[Path], cases: list[dict[str, Any]], implementation: str, steps: int
) -> dict[tuple[int, int], Any]:
    from pilotage.training.mesh import Parallel

    found = {}
    for index, path in enumerate(paths):
        for number, case in enumerate(cases):
            model = load(path, implementation)
            batches = global_batches(model.config.vocab_size, steps)
            found[index, number] = meshed_run(model, Parallel(**case), batches)
    return found


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def assert_same_training(got: dict[str, Any], expected: dict[str, Any], start: dict[str, torch.Tensor]) -> None:
    assert got["gradients"].keys() == expected["gradients"].keys()
    off = {name: relative(got["gradients"][name], value) for name, value in expected["gradients"].items()}
    assert all(value < GRADIENT for value in off.values()), sorted(off.items(), key=lambda item: -item[1])[:5]
    for key in ("losses", "evaluated"):
        assert got[key] == pytest.approx(expected["losses"], abs=LOSS)
    assert got["norms"] == pytest.approx(expected["norms"], rel=NORM)
    assert got["weights"].keys() == expected["weights"].keys()
    moved = {
        name: relative(got["weights"][name] - start[name], value - start[name])
        for name, value in expected["weights"].items()
    }
    bounds = {name: UPDATE_KEY_BIAS if name.endswith("k_proj.bias") else UPDATE for name in moved}
    far = {name: value for name, value in moved.items() if not value < bounds[name]}
    assert not far, far


def check(
    paths: list[Path],
    cases: list[dict[str, Any]],
    world: int,
    out: Path,
    implementation: str,
    reference: str = "transformers",
    steps: int = STEPS,
) -> None:
    """`reference`: whose class the single process runs; parameters of experts have other names in transformers."""
    results = run(work, world, out, paths, cases, implementation, steps)
    for index, path in enumerate(paths):
        model = load(path, reference)
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        expected = plain_run(model, global_batches(model.config.vocab_size, steps))
        assert all(norm > 0.5 for norm in expected["norms"]), "clipping is part of what is compared"
        for number in range(len(cases)):
            for result in results:
                assert_same_training(result[index, number], expected, start)


def biased(tiny: Callable[..., Path]) -> Path:
    """Three layers do not divide over two stages, and biases on both sides of a divided product must count once."""
    return tiny("llama3", attention_bias=True, mlp_bias=True, num_hidden_layers=3, tie_word_embeddings=True)


def test_two_processes_train_as_one(tiny: Callable[..., Path], tmp_path: Path) -> None:
    check([tiny("gemma3", num_hidden_layers=3)], TWO, 2, tmp_path, "pilotage", steps=2)


@pytest.mark.slow
def test_two_processes_train_whole_models_as_one(tiny: Callable[..., Path], tmp_path: Path) -> None:
    check([tiny("llama3"), tiny("gemma3"), tiny("qwen2"), tiny("qwen3")], TWO, 2, tmp_path, "pilotage")


@pytest.mark.slow
def test_every_mesh_and_model_trains_as_one(tiny: Callable[..., Path], tmp_path: Path) -> None:
    check([tiny("llama3"), tiny("gemma3"), biased(tiny)], FOUR, 4, tmp_path, "pilotage")


@pytest.mark.slow
def test_biases_and_uneven_stages_train_as_one(tiny: Callable[..., Path], tmp_path: Path) -> None:
    check([biased(tiny)], TWO, 2, tmp_path, "pilotage")


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_transformers_own_classes_train_as_one(world: int, tiny: Callable[..., Path], tmp_path: Path) -> None:
    check([tiny("llama3"), tiny("gemma3")], TWO if world == 2 else FOUR, world, tmp_path, "transformers")


@pytest.mark.slow
def test_dealt_experts_train_as_one(tiny: Callable[..., Path], tmp_path: Path) -> None:
    paths = [tiny("qwen3_moe"), tiny("mixtral", num_local_experts=6)]
    meshes = [{"tp": 2, "ep": 2}, {"tp": 2, "ep": 2, "sequence_parallel": True}]
    check(paths, meshes, 2, tmp_path, "pilotage", reference="pilotage")
    wider = [{"tp": 2, "ep": 2, "dp": 2}, {"tp": 2, "ep": 2, "pp": 2, "sequence_parallel": True}]
    check(paths[:1], wider, 4, tmp_path, "pilotage", reference="pilotage")


@pytest.mark.slow
def test_three_axes_at_once(tiny: Callable[..., Path], tmp_path: Path) -> None:
    check([tiny("gemma3")], [{"tp": 2, "dp": 2, "pp": 2, "sequence_parallel": True}], 8, tmp_path, "pilotage")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_runs_leave_cleanly_with_the_same_weights(tiny: Callable[..., Path]) -> None:
    """A process that aborts while the interpreter takes it down has a code of its own."""
    script = Path(__file__).with_name("leave_cleanly.py")
    command = [sys.executable, str(script), str(tiny("llama3", num_hidden_layers=2)), "50"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 50
    assert len(set(lines)) == 1 and lines[0].startswith("[0, 0, 0, 0] "), lines[:3]
    assert "terminate called" not in done.stderr
