"""docs/training.md is run as it stands: its commands, its code, and what it says they print."""

from __future__ import annotations

import re
from pathlib import Path

import pages
import pytest
from pages import Reader

PAGE = pages.DOCS / "training.md"


def test_every_block_is_accounted_for() -> None:
    fences = len(re.findall(r"^```\w", PAGE.read_text(), re.MULTILINE))
    assert fences == len(pages.blocks(PAGE))


@pytest.mark.slow
def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTAGE_HOME", str(tmp_path / "home"))
    reader = Reader(tmp_path)
    for what, text in pages.blocks(PAGE):
        reader.follow(what, text)
