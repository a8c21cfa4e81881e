"""Planted faults of training are found by the checks, and the first name is the right one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pilotage.accuracy import train_checks
from pilotage.accuracy.faults import training
from pilotage.accuracy.faults.table.training import FAULTS

NAMES = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight")


def expected() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    draw = {name: torch.randn(6, 4, generator=generator) for name in NAMES}
    start = {name: torch.randn(6, 4, generator=generator) for name in NAMES}
    weights = {name: start[name] + 0.01 * draw[name].sign() for name in NAMES}
    return {"losses": [8.0, 7.9], "norms": [3.0, 2.9], "gradients": draw, "start": start, "weights": weights}


def found(**changes: Any) -> list[train_checks.Alarm]:
    right = expected()
    given = {key: dict(value) if isinstance(value, dict) else list(value) for key, value in right.items()}
    for key, value in changes.items():
        given[key] = given[key] | value if isinstance(value, dict) else value
    said = {"losses": given["losses"], "norms": given["norms"]}
    return train_checks.in_order(train_checks.compare(said, given["gradients"], given["weights"], right))


def test_what_is_the_same_up_to_rounding_raises_nothing() -> None:
    noisy = {name: value * (1 + 1e-6) for name, value in expected()["gradients"].items()}
    assert found() == [] == found(gradients=noisy)


def test_a_gradient_that_is_twice_too_large_is_called_that() -> None:
    name = NAMES[1]
    (alarm,) = found(gradients={name: 2 * expected()["gradients"][name]})
    assert (alarm.check, alarm.culprit) == ("gradients", name)
    assert "2 times what it should be" in alarm.what


def test_the_most_wrong_gradient_comes_first_and_a_missing_one_before_it() -> None:
    right = expected()["gradients"]
    wrong = {NAMES[0]: 1.01 * right[NAMES[0]], NAMES[2]: 3 * right[NAMES[2]]}
    assert [alarm.culprit for alarm in found(gradients=wrong)] == [NAMES[2], NAMES[0]]
    right = expected()
    said = {"losses": right["losses"], "norms": right["norms"]}
    lost = {name: value for name, value in right["gradients"].items() if name != NAMES[1]}
    (alarm,) = train_checks.compare(said, lost, right["weights"], right)
    assert alarm.culprit == NAMES[1] and alarm.what == "has no gradient"


def test_a_norm_over_a_part_is_told_from_gradients_that_are_wrong() -> None:
    (alarm,) = found(norms=[2.5, 2.4])
    assert (alarm.check, alarm.culprit) == ("norm", "gradient norm")


def test_a_number_that_is_none_is_found() -> None:
    name = NAMES[0]
    assert found(gradients={name: torch.full((6, 4), float("nan"))})[0].culprit == name
    assert found(losses=[float("nan"), 7.9])[0].check == "loss"


def test_weights_that_moved_otherwise_are_found_where_gradients_are_right() -> None:
    start = expected()["start"][NAMES[0]]
    (alarm,) = found(weights={NAMES[0]: start})
    assert (alarm.check, alarm.culprit) == ("weights", NAMES[0])


@pytest.mark.slow
@pytest.mark.distributed
def test_every_fault_is_found_and_named_and_nothing_else_is() -> None:
    results = training.measure(FAULTS, clean=("gemma3", "llama3"))
    for clean in ("gemma3", "llama3"):
        assert results[clean]["alarms"] == []
    for fault in FAULTS:
        result = training.result(fault, results[fault.id])
        assert result["detected"] and result["named_first"], (fault.name, result["culprits"][:3])
