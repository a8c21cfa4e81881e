"""pytest imports test files by their bare names here, so two files of one name cannot be collected together."""

from __future__ import annotations

from collections import Counter
from pathlib import Path


def test_a_test_files_name_is_used_once() -> None:
    names = Counter(path.name for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert not [name for name, count in names.items() if count > 1]
