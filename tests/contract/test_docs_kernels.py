"""docs/kernels.md is run as it stands: the worked example, the served model, and the faults that `check` finds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pages
import pytest
from pages import Reader

PAGE = pages.DOCS / "kernels.md"


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    directory = tmp_path_factory.mktemp("kernels")
    (directory / "examples").symlink_to(Path(__file__).parents[2] / "examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PILOTAGE_HOME", str(tmp_path_factory.mktemp("home")))
        yield Reader(directory)


def parts(engine: bool) -> list[list[tuple[str, str]]]:
    """Each run with what it prints."""
    found: list[list[tuple[str, str]]] = []
    for what, text in pages.blocks(PAGE):
        if what.startswith(("run", "python")):
            found.append([])
        if found and not what.startswith("shows"):
            found[-1].append((what, text))
    return [part for part in found if ("engine" in part[0][0]) is engine]


def test_every_block_is_marked_and_what_is_shown_is_there(reader: Reader) -> None:
    fences = len(re.findall(r"^```\w+", PAGE.read_text(), re.MULTILINE))
    assert fences == len(pages.blocks(PAGE))
    assert len(parts(engine=False)) == 8 and len(parts(engine=True)) == 1
    for what, text in pages.blocks(PAGE):
        if what.startswith("shows"):
            reader.follow(what, text)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_a_command_prints_what_the_page_says(part: int, reader: Reader) -> None:
    for what, text in parts(engine=False)[part]:
        reader.follow(what, text)


@pytest.mark.engine
@pytest.mark.slow
def test_the_model_is_served(reader: Reader) -> None:
    for what, text in parts(engine=True)[0]:
        reader.follow(what, text)
