"""docs/accuracy.md is run as it stands: the three worked cases, and the lines of Python."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pages
import pytest
from pages import Reader

PAGE = pages.DOCS / "accuracy.md"


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    directory = tmp_path_factory.mktemp("accuracy")
    (directory / "examples").symlink_to(Path(__file__).parents[2] / "examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PILOTAGE_HOME", str(tmp_path_factory.mktemp("home")))
        yield Reader(directory)


def cases() -> list[list[tuple[str, str]]]:
    """The blocks of each worked case: every one begins by planting its fault."""
    found: list[list[tuple[str, str]]] = []
    for what, text in pages.blocks(PAGE):
        if "plant_fault.py" in text:
            found.append([])
        found[-1].append((what, text))
    return found


def test_there_are_three_cases() -> None:
    assert len(cases()) == 3
    fences = len(re.findall(r"^```(?:bash|text)", PAGE.read_text(), re.MULTILINE))
    assert fences == len(pages.blocks(PAGE)) - 1  # all but the lines of Python, which come last


# The first case starts an engine; its command is among the fast tests in tests/faults/test_planted_engine.py.
@pytest.mark.parametrize("case", [pytest.param(0, marks=pytest.mark.slow), 1, 2])
def test_a_case_is_found_as_the_page_says(case: int, reader: Reader) -> None:
    for what, text in cases()[case]:
        if what != "python":
            reader.follow(what, text)


@pytest.mark.engine
@pytest.mark.slow
def test_the_lines_of_python(reader: Reader) -> None:
    if not (reader.directory / "wrong-swap").exists():
        reader.run("python examples/plant_fault.py swap wrong-swap")
    reader.follow(*next((what, text) for what, text in pages.blocks(PAGE) if what == "python"))
