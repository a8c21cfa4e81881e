"""Mistakes on the command line of `pilotage bench`: one line that says what to do, and exit code 2."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pilotage", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--loads", "decode-x2"), "no load 'decode-x2'; choose from decode-x1"),
        (("--peer-python", "/nowhere/python"), "no such interpreter; name its bin/python"),
        (("--peer-python", "/bin/false"), "--peer-python /bin/false: it does not run"),
        (("--peer-env", "novalue"), "--peer-env: 'novalue' is no KEY=VALUE"),
    ],
    ids=["load", "no interpreter", "no Python", "setting"],
)
def test_mistakes_are_explained(arguments: tuple[str, ...], said: str) -> None:
    done = bench("tiny:llama3", *arguments)
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_port_in_use_is_found_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = bench("tiny:llama3", "--port", str(port))
    assert done.returncode == 2
    assert f"port {port}: cannot listen on it" in done.stderr and "Traceback" not in done.stderr


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    done = bench(str(tmp_path / "nothing"))
    assert done.returncode == 2
    assert "nothing" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.engine
def test_a_server_that_dies_is_reported(tmp_path: Path, tiny: object) -> None:
    """A checkpoint without one of its tensors: the server's own words reach the user."""
    import shutil

    from safetensors.torch import load_file, save_file

    broken = tmp_path / "model"
    shutil.copytree(tiny("llama3"), broken)  # type: ignore[operator]
    (file,) = broken.glob("*.safetensors")
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    done = bench(str(broken), "--no-hf", "--no-profile", "--loads", "decode-x1")
    assert done.returncode == 2
    assert "model.norm.weight" in done.stderr and "Traceback" not in done.stderr
