"""Switches in the environment are read one way everywhere."""

from __future__ import annotations

import pytest

from pilotage.core.environment import switched_on


@pytest.mark.parametrize("value", ["1", "true", "True", "YES", "on"])
def test_on(value: str) -> None:
    assert switched_on("A", {"A": value}) == "A"


@pytest.mark.parametrize("value", ["", "0", "false", "no", "off", "2"])
def test_off(value: str) -> None:
    assert switched_on("A", {"A": value}) is None


def test_the_spelling_that_is_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert switched_on(("OURS", "THEIRS"), {"THEIRS": "1", "OURS": "0"}) == "THEIRS"
    monkeypatch.setenv("PILOTAGE_A_SWITCH", "on")
    assert switched_on("PILOTAGE_A_SWITCH") == "PILOTAGE_A_SWITCH"
