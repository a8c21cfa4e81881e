"""docs/onboarding.md is run as it stands: its commands, its code, and what it says they print."""

from __future__ import annotations

import re

import pages
import pytest
from pages import Reader

PAGE = pages.DOCS / "onboarding.md"


def blocks() -> list[tuple[str, str]]:
    return pages.blocks(PAGE)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader(tmp_path_factory.mktemp("onboarding"))


@pytest.fixture(scope="module")
def followed(reader: Reader) -> Reader:
    """The page up to the first block that needs an engine."""
    for what, text in blocks():
        if "engine" in what:
            break
        reader.follow(what, text)
    return reader


def test_every_block_is_accounted_for() -> None:
    fences = len(re.findall(r"^```\w", PAGE.read_text(), re.MULTILINE))
    assert fences == len(blocks()) + 1  # `pilotage bench MODEL` is shown, not run


def test_the_page_up_to_the_engine(followed: Reader) -> None:
    model = (followed.directory / "qwen3x-port" / "qwen3x" / "model.py").read_text()
    assert "port(" not in model and "self.q_norm(q)" in model


def test_what_was_written_passes_the_linter(followed: Reader) -> None:
    followed.run("python -m ruff check qwen3x-port/qwen3x && python -m ruff format --check qwen3x-port/qwen3x")


def test_a_norm_left_out_fails_the_scaffolds_tests(followed: Reader) -> None:
    """The page says what its tests would catch."""
    model = followed.directory / "qwen3x-port" / "qwen3x" / "model.py"
    right = model.read_text()
    model.write_text(right.replace("self.k_norm(k), *rope", "k, *rope"))
    try:
        followed.run("PYTHONPATH=qwen3x-port python -m pytest -q qwen3x-port/tests", expected=1)
    finally:
        model.write_text(right)
    assert "3 failed, 2 passed" in followed.printed


@pytest.mark.engine
@pytest.mark.slow
def test_the_rest_with_an_engine(followed: Reader) -> None:
    names = [what for what, _ in blocks()]
    first = next(i for i, what in enumerate(names) if "engine" in what)
    for what, text in blocks()[first:]:
        followed.follow(what, text)
