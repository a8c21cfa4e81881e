"""Results that are kept under a key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pilotage.core import store


def doubled(value: Any) -> int:
    return 2 * int(value["n"])


def test_a_result_is_found_under_its_key_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTAGE_HOME", str(tmp_path))
    path = store.keyed("things", ["a", 1, None])
    assert path.parent == tmp_path / "things" and path == store.keyed("things", ("a", 1, None))
    assert path != store.keyed("things", ["a", 2, None])
    assert store.kept(path, doubled) is None
    store.write_json(path, {"n": 4})
    assert store.kept(path, doubled) == 8


@pytest.mark.parametrize("text", ['{"n": 4', "{}", "[]", '{"n": null}'], ids=["torn", "no key", "a list", "no number"])
def test_what_is_damaged_or_of_another_form_is_not_there(text: str, tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_text(text)
    assert store.kept(path, doubled) is None
