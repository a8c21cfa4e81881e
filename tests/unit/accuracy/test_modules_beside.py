"""Modules that take more than rows, positions and a context: Gemma 4's, which share keys and get inputs by layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pilotage.accuracy import modules
from pilotage.accuracy.arms import hf
from pilotage.accuracy.arms.module import HFModules, Job, OurModules
from pilotage.accuracy.modules import ModulePlan

TOKENS = torch.randint(5, 300, (60,), generator=torch.Generator().manual_seed(0)).tolist()
PLAN = ModulePlan(patterns=["layers.[4,5,7]", "layers.[4,5,7].self_attn"])


def statuses(path: Path, model: object) -> dict[str, str]:
    found = modules.check(path, path, model, TOKENS, dtypes=["float32"], plan=PLAN)
    return {entry["module"]: entry["verdict"]["status"] for entry in found}


def test_layers_that_read_an_earlier_layers_keys_are_compared(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny("gemma4")
    model = hf.load(path, torch.float32)
    clean = statuses(path, model)
    assert set(clean) == {f"layers.{n}{part}" for n in (4, 5, 7) for part in ("", ".self_attn")}
    assert set(clean.values()) == {"pass"}, clean

    # And a layer that reads other keys than these is found.
    real = OurModules.with_context

    def later(self: OurModules, job: Job) -> torch.Tensor:
        beside = {key: value.roll(1, 2) if key == "keys" else value for key, value in job.beside.items()}
        return real(self, dataclasses.replace(job, beside=beside))

    monkeypatch.setattr(OurModules, "with_context", later)
    wrong = {name for name, status in statuses(path, model).items() if status == "fail"}
    assert wrong == {"layers.5", "layers.5.self_attn", "layers.7", "layers.7.self_attn"}


def test_what_a_module_gets_beside_its_input_counts(tiny: Callable[..., Path]) -> None:
    path = tiny("gemma4")
    arm = HFModules(hf.load(path, torch.float32), TOKENS, ["layers.4", "layers.7", "layers.7.self_attn"])
    assert set(arm.beside("layers.4")) == {"per_layer_input"}
    beside = arm.beside("layers.7")
    assert set(beside) == {"per_layer_input", "keys", "values"}
    assert beside["keys"].shape == (1, 1, len(TOKENS), 40)
    x = arm.calls["layers.7"].x
    own = arm.run("layers.7", x, beside)
    assert torch.equal(own, arm.run("layers.7", x))
    for name in beside:
        changed = arm.run("layers.7", x, {**beside, name: beside[name].roll(1, -1)})
        assert float((changed - own).norm() / own.norm()) > 1e-3, name


def test_the_first_layers_that_share_are_chosen_as_well() -> None:
    types = ["s", "s", "f", "s", "f", "s", "s", "f"]
    assert modules.chosen(types) == [0, 2, 7]
    assert modules.chosen(types, shared=3) == [0, 2, 5, 7]


def test_every_row_of_the_embedding_is_compared(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that no token of the stream has is wrong: nothing else shows it."""
    path = tiny("llama3")
    model = hf.load(path, torch.float32)
    plan = ModulePlan(patterns=["embed_tokens"])
    unused = next(token for token in range(300) if token not in TOKENS)
    real = OurModules.__init__

    def spoiled(self: OurModules, *args: object) -> None:
        real(self, *args)  # type: ignore[arg-type]
        self.model.model.embed_tokens.weight[unused] += 0.1

    def found() -> dict[str, str]:
        entries = modules.check(path, path, model, TOKENS, dtypes=["float32"], plan=plan)
        return {entry["module"]: entry["verdict"]["status"] for entry in entries}

    assert found() == {"embed_tokens": "pass", "embed_tokens (all tokens)": "pass"}
    monkeypatch.setattr(OurModules, "__init__", spoiled)
    assert found() == {"embed_tokens": "pass", "embed_tokens (all tokens)": "fail"}
    assert len(modules._everywhere(320)) == 320
    large = modules._everywhere(262144)
    assert len(large) < 9000 and {0, 63, 262143, 262080} <= set(large.tolist())
