"""Validation at the cost of tiny models."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

# Before vllm is imported anywhere: the engine lives in the test's process.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@pytest.fixture(scope="session", autouse=True)
def one_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clean controls are measured once a session, and nothing of the user's cache is used."""
    home = tmp_path_factory.mktemp("home")
    os.environ["PILOTAGE_HOME"] = str(home)
    return home


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process: for what ends before any work begins."""
    from pilotage import cli

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["pilotage", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, error = capsys.readouterr()
        return int(ended.value.code or 0), out, error

    return run


@pytest.fixture
def uncompiled_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the controls that take seconds to compile; the others are enough for a bound."""
    from pilotage.accuracy import controls

    monkeypatch.setattr(controls, "CONTROLS", tuple(c for c in controls.CONTROLS if not c.compiled))
