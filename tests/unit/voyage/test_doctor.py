"""The doctor on this machine, and on machines that lack something."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from pilotage.voyage import doctor


def states(findings: list[doctor.Finding]) -> dict[str, str]:
    return {finding.part: finding.state for finding in findings}


def test_this_machine_is_usable_and_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pilotage", "doctor", "--json"], capture_output=True, text=True, check=False
    )
    result = json.loads(done.stdout)
    assert done.returncode == 0, [finding for finding in result["findings"] if finding["state"] != "ok"]
    assert result["usable"] is True
    usable = {target["target"]: target["usable"] for target in result["targets"]}
    assert usable == {"cpu": True, "neuron": False, "cuda": False}
    assert all("untested on hardware" in target["why"] for target in result["targets"][1:])


def test_it_imports_neither_torch_nor_vllm() -> None:
    source = (
        "import sys; from pilotage.voyage.doctor import examine; examine(); print({'torch', 'vllm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_missing_package_makes_the_target_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "vllm" else real(name))
    result = doctor.examine()
    assert result["usable"] is False and "vllm" in result["targets"][0]["why"]
    (finding,) = [finding for finding in result["findings"] if finding["part"] == "vllm"]
    assert finding["state"] == "missing" and "make setup" in finding["do"]


def test_the_wrong_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: "2.12.1+cpu")
    finding = doctor.package("torch", "2.13.0")
    assert finding.state == "missing" and "2.12.1" in finding.found and "2.13.0" in finding.found


def test_a_second_platform_plugin_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = metadata.EntryPoint("pilotage", "pilotage.serving.plugin:platform", doctor.PLATFORM_GROUP)
    other = metadata.EntryPoint("neuron", "vllm_neuron:register", doctor.PLATFORM_GROUP)
    models = metadata.EntryPoint("pilotage", "pilotage.serving.plugin:register_models", doctor.GENERAL_GROUP)
    points = {doctor.PLATFORM_GROUP: [ours, other], doctor.GENERAL_GROUP: [models]}
    monkeypatch.setattr(doctor, "_entry_points", points.__getitem__)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert states(doctor.plugins()) == {"platform plugin": "ok", "other platform plugins": "warning"}
    monkeypatch.setenv("VLLM_PLUGINS", "pilotage")
    assert states(doctor.plugins()) == {"platform plugin": "ok"}
    monkeypatch.setenv("VLLM_PLUGINS", "neuron")
    assert states(doctor.plugins())["VLLM_PLUGINS"] == "missing"


def test_a_platform_that_is_not_registered_or_switched_off_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTAGE_DISABLE", "1")
    assert states(doctor.plugins())["platform plugin"] == "missing"
    monkeypatch.delenv("PILOTAGE_DISABLE")
    monkeypatch.setattr(doctor, "_entry_points", lambda group: [])
    assert set(states(doctor.plugins()).values()) == {"missing"}


def test_a_compiler_that_is_absent_or_broken_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert doctor.compiler().state == "ok"
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert doctor.compiler().state == "missing"
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho 't.cpp:1: error: no headers' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    finding = doctor.compiler()
    assert finding.state == "missing" and "no headers" in finding.found


def test_little_memory_and_disk_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_available_memory", lambda: 1 << 30)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("usage", (), {"free": 1 << 20}))
    found = states(doctor.resources())
    assert found["memory"] == "warning" and found["disk"] == "warning"
