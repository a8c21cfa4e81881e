"""The command line in this process, for what does not need one of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from pilotage import cli


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run `pilotage ARGUMENTS`: (exit code, standard output, standard error)."""

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pilotage", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        captured = capfd.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return command
