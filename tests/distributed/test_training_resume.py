"""A run that is cut off anywhere goes on as if it had not been, on the same processes or on others."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training_ranks import run

from pilotage.training import checkpoint, metrics
from pilotage.training.recipe import Recipe
from pilotage.training.run import train

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]
STEPS = 6


def recipe(model: Path, out: Path, **changes: Any) -> Recipe:
    text = out.parent / "text.txt"
    text.parent.mkdir(parents=True, exist_ok=True)
    text.write_text("\n\n".join(f"Buoy {n} lies {n * n} cables from light {n % 7}." for n in range(60)))
    values = {
        "out": str(out),
        "model": {"start": str(model)},
        "data": {"train": [str(text)], "documents": "paragraph", "sequence_length": 24},
        "steps": STEPS,
        "batch": {"rows": 8, "micro_rows": 2},
        "optimizer": {"lr": 1e-3, "max_norm": 0.5},
        "schedule": {"warmup_steps": 2},
        "checkpoint": {"every": 1, "keep": 2},
        **changes,
    }
    return Recipe.from_dict(values)


def weights(out: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.directory(out, step) / "model.safetensors")


def losses(out: Path) -> list[float]:
    lines = metrics.read(out)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)), "each step once, in order"
    return [line["loss"] for line in lines]


def same(got: Path, expected: Path) -> None:
    one, other = weights(got), weights(expected)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert losses(got) == losses(expected)
    a, b = (checkpoint.directory(path, STEPS) / "state.json" for path in (got, expected))
    assert json.loads(a.read_text())["rows"] == json.loads(b.read_text())["rows"] == STEPS * 8


def child(made: Recipe) -> multiprocessing.Process:
    """Start a run in a fork of this process, which has everything imported already."""
    process = multiprocessing.get_context("fork").Process(target=train, args=(made,))
    process.start()
    return process


def kill(process: Any) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def wait_for(there: Callable[[], bool], process: Any) -> None:
    until = time.monotonic() + 120
    while not there() and process.is_alive():
        assert time.monotonic() < until, "never came"
        time.sleep(0.0005)


def test_killed_while_saving_and_after_it(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny("gemma3", num_hidden_layers=3)
    train(recipe(model, tmp_path / "straight" / "run"))
    out = tmp_path / "killed" / "run"
    made = recipe(model, out)
    process = child(made)
    part = out / "checkpoints" / ".step-00000003.part"
    wait_for(part.exists, process)
    kill(process)
    assert part.exists() and checkpoint.whole(out)[-1].name == "step-00000002", "cut off while it was saving"
    process = child(made)
    wait_for(lambda: bool(checkpoint.whole(out)) and checkpoint.whole(out)[-1].name >= "step-00000004", process)
    kill(process)
    done = train(made)
    assert 4 <= done.resumed_from < STEPS
    same(out, tmp_path / "straight" / "run")
    assert not list((out / "checkpoints").glob(".*")), "nothing half-written is left"
    assert len(checkpoint.whole(out)) == 2


@pytest.mark.slow
def test_killed_at_ten_random_points(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny("llama3")
    began = time.monotonic()
    train(recipe(model, tmp_path / "straight" / "run"))
    usual = time.monotonic() - began
    draw = random.Random(7)
    out, kills, saving = tmp_path / "killed" / "run", 0, 0
    made = recipe(model, out)
    while kills < 10:
        process = child(made)
        process.join(draw.uniform(0.05, 0.9) * usual)
        if not process.is_alive():
            # It got to the end before its turn came: begin again, and earlier.
            same(out, tmp_path / "straight" / "run")
            train_again = checkpoint.directory(out, STEPS)
            assert train_again.is_dir()
            made = recipe(model, tmp_path / f"killed{kills}" / "run")
            out = tmp_path / f"killed{kills}" / "run"
            continue
        kill(process)
        kills += 1
        saving += bool(list((out / "checkpoints").glob(".step-*"))) if out.is_dir() else 0
    train(made)
    same(out, tmp_path / "straight" / "run")
    print(f"{kills} kills, {saving} of them while saving")


MESHES = [{"dp": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}]


def legs(rank: int, model: Path, out: Path, meshes: list[dict[str, Any]]) -> None:
    """Each mesh trains two steps more than the one before it."""
    for number, mesh in enumerate(meshes):
        stop = StopAfter(2 * (number + 1))
        try:
            train(recipe(model, out, parallel=mesh), watcher=stop.watcher())
        except Stopped:
            continue


class Stopped(Exception):
    pass


class StopAfter:
    """Ends a run as an interruption would, after a checkpoint, in all processes alike."""

    def __init__(self, step: int) -> None:
        self.step = step

    def watcher(self) -> Any:
        from pilotage.training.run import Watcher

        def saved(path: Path) -> None:
            if path.name == f"step-{self.step:08d}" and self.step < STEPS:
                raise Stopped

        return Watcher(saved=saved)


def close(got: Path, expected: Path) -> None:
    assert losses(got) == pytest.approx(losses(expected), abs=2e-5)
    one, other = weights(got), weights(expected)
    assert one.keys() == other.keys()
    for name, value in other.items():
        assert float((one[name] - value).norm()) < 1e-4 * float(value.norm()), name


@pytest.mark.slow
def test_each_leg_on_another_mesh_keeps_the_trajectory(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Two steps sharded, two tensor parallel, two in a pipeline: the run of one process, tied head included."""
    from transformers import AutoModelForCausalLM

    model = tiny("gemma3", num_hidden_layers=3)
    train(recipe(model, tmp_path / "straight" / "run"))
    run(legs, 2, tmp_path, model, tmp_path / "legs" / "run", MESHES)
    close(tmp_path / "legs" / "run", tmp_path / "straight" / "run")
    loaded, info = AutoModelForCausalLM.from_pretrained(
        checkpoint.directory(tmp_path / "legs" / "run", STEPS), output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    saved = weights(tmp_path / "legs" / "run")
    assert all(torch.equal(p, saved[name]) for name, p in loaded.named_parameters())


@pytest.mark.slow
def test_from_four_processes_to_one_and_back(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny("llama3")
    train(recipe(model, tmp_path / "straight" / "run"))
    out = tmp_path / "legs" / "run"
    run(legs, 4, tmp_path, model, out, [{"tp": 2, "dp": 2}])
    with contextlib.suppress(Stopped):
        train(recipe(model, out), watcher=StopAfter(4).watcher())
    run(last, 4, tmp_path, model, out)
    close(out, tmp_path / "straight" / "run")


def last(rank: int, model: Path, out: Path) -> None:
    train(recipe(model, out, parallel={"tp": 2, "pp": 2}))


@pytest.mark.slow
def test_experts_are_saved_one_by_one_from_any_mesh(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Parameters stack experts, checkpoints do not: dealt out, then sharded, then in one process."""
    from transformers import AutoModelForCausalLM

    model = tiny("qwen3_moe")
    train(recipe(model, tmp_path / "straight" / "run"))
    out = tmp_path / "legs" / "run"
    run(two_legs, 2, tmp_path, model, out)
    train(recipe(model, out))
    close(out, tmp_path / "straight" / "run")
    _, info = AutoModelForCausalLM.from_pretrained(checkpoint.directory(out, STEPS), output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def two_legs(rank: int, model: Path, out: Path) -> None:
    legs(rank, model, out, [{"tp": 2, "ep": 2}, {"dp": 2}])
