"""The target is what the environment asks for, and never silently another one."""

from __future__ import annotations

import pytest

from pilotage.core.errors import ConfigError, Unavailable, Unsupported
from pilotage.serving import targets


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, "cpu"),
        ({"PILOTAGE_TARGET": ""}, "cpu"),
        ({"PILOTAGE_TARGET": "cuda"}, "cuda"),
        ({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}, "neuron"),
        ({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2", "PILOTAGE_TARGET": "cpu"}, "cpu"),
    ],
)
def test_selection(environment: dict[str, str], name: str) -> None:
    assert targets.select(environment).name == name


def test_an_unknown_target_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'neurn'; the nearest is 'neuron'"):
        targets.select({"PILOTAGE_TARGET": "neurn"})


def test_missing_packages_are_named() -> None:
    with pytest.raises(Unavailable, match="target neuron: the target needs torch_neuronx, which"):
        targets.require(targets.TARGETS["neuron"], lambda name: name != "torch_neuronx")


@pytest.mark.parametrize("name", ["neuron", "cuda"])
def test_a_target_without_a_worker_is_refused_even_with_its_packages(name: str) -> None:
    with pytest.raises(Unsupported, match=f"target {name}: the worker of this version"):
        targets.require(targets.TARGETS[name], lambda _: True)


def test_the_cpu_needs_nothing() -> None:
    targets.require(targets.TARGETS["cpu"], lambda _: False)


def test_the_platform_asks_before_it_configures(monkeypatch: pytest.MonkeyPatch) -> None:
    from pilotage.serving.platform import PilotagePlatform

    monkeypatch.setenv("PILOTAGE_TARGET", "cuda")
    with pytest.raises((Unavailable, Unsupported), match="target cuda"):
        PilotagePlatform.check_and_update_config(None)  # type: ignore[arg-type]
