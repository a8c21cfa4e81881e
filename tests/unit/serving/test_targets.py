"""The target is what the environment asks for, and never silently another one."""

from __future__ import annotations

import pytest

from pilotage.core.errors import ConfigError, Unavailable
from pilotage.serving import targets


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, "cpu"),
        ({"PILOTAGE_TARGET": ""}, "cpu"),
        ({"PILOTAGE_TARGET": "cuda"}, "cuda"),
        ({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}, "neuron"),
        ({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2", "PILOTAGE_TARGET": "cpu"}, "cpu"),
        ({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2", "NKI_SIMULATOR": "1"}, "cpu"),
        ({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2", "NKI_SIMULATOR": "True"}, "cpu"),
    ],
)
def test_selection(environment: dict[str, str], name: str) -> None:
    assert targets.select(environment, nothing, nothing).name == name


def nothing(_: object) -> bool:
    return False


def everything(_: object) -> bool:
    return True


def test_a_device_that_is_here_is_chosen_unless_another_target_is_named() -> None:
    assert targets.select({}, everything, lambda target: target.name == "cuda").name == "cuda"
    assert targets.select({}, everything, everything).name == "neuron"
    assert targets.select({}, lambda name: name == "triton", lambda target: target.name == "neuron").name == "cpu"
    assert targets.select({"PILOTAGE_TARGET": "cpu"}, everything, everything).name == "cpu"


def test_this_machine_has_no_accelerator_and_serves_on_the_cpu() -> None:
    assert not any(targets._present(targets.TARGETS[name]) for name in ("neuron", "cuda"))
    assert targets.select({}).name == "cpu"


def test_an_unknown_target_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'neurn'; the nearest is 'neuron'"):
        targets.select({"PILOTAGE_TARGET": "neurn"})


def test_missing_packages_are_named() -> None:
    with pytest.raises(Unavailable, match="target neuron: the target needs torch_neuronx, which"):
        targets.require(targets.TARGETS["neuron"], {}, lambda name: name != "torch_neuronx", everything)


@pytest.mark.parametrize("name", ["neuron", "cuda"])
def test_a_target_without_a_device_only_compiles(name: str) -> None:
    with pytest.raises(Unavailable, match=f"target {name}: torch sees no such device here"):
        targets.require(targets.TARGETS[name], {}, everything, nothing)
    targets.require(targets.TARGETS[name], {"VLLM_NEURON_CPU_COMPILE": "1"}, everything, nothing)


def test_the_cpu_needs_nothing() -> None:
    targets.require(targets.TARGETS["cpu"], {}, nothing)


def test_the_platform_asks_before_it_configures(monkeypatch: pytest.MonkeyPatch) -> None:
    from pilotage.serving.platform import PilotagePlatform

    monkeypatch.setenv("PILOTAGE_TARGET", "cuda")
    with pytest.raises(Unavailable, match="target cuda"):
        PilotagePlatform.check_and_update_config(None)  # type: ignore[arg-type]
