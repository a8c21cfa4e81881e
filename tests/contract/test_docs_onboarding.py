"""docs/onboarding.md is run as it stands: its commands, its code, and what it says they print.

A comment before a fenced block says what the block is: `run` (with `exit N`, or `engine` for what starts an engine),
`prints` (lines that the last run printed), `shows FILE` (a part of a file), `class NAME in FILE` and `import from
MODULE in FILE` (code that takes the place of the class or import there).
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "onboarding.md"
BLOCK = re.compile(r"<!-- (?P<what>.+?) -->\n```\w*\n(?P<text>.*?)```", re.DOTALL)


@dataclass
class Reader:
    """Someone who follows the page in an empty directory."""

    directory: Path
    printed: str = ""

    def run(self, commands: str, expected: int = 0) -> None:
        site = self.directory / "site"
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
            # Installed for this reader, not into the environment that runs the tests.
            "PIP_TARGET": str(site),
            "PYTHONPATH": str(site),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        done = subprocess.run(
            ["bash", "-ec", commands],
            cwd=self.directory,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        self.printed = done.stdout
        assert done.returncode == expected, f"{commands}\n{done.stdout[-4000:]}"

    def follow(self, what: str, text: str) -> None:
        if what.startswith("run"):
            code = re.search(r"exit (\d)", what)
            self.run(text, int(code[1]) if code else 0)
        elif what == "prints":
            printed = plain(self.printed)
            for line in text.splitlines():
                assert plain(line) in printed, f"not printed: {line}\n{self.printed[-4000:]}"
        elif match := re.fullmatch(r"shows (\S+)", what):
            assert text in (self.directory / match[1]).read_text()
        elif match := re.fullmatch(r"class (\w+) in (\S+)", what):
            self.replace(match[2], text, lambda node: isinstance(node, ast.ClassDef) and node.name == match[1])
        elif match := re.fullmatch(r"import from (\S+) in (\S+)", what):
            self.replace(match[2], text, lambda node: isinstance(node, ast.ImportFrom) and node.module == match[1])
        else:
            pytest.fail(f"no such kind of block: {what}")

    def replace(self, file: str, text: str, wanted: object) -> None:
        path = self.directory / file
        old = path.read_text()
        node = next(node for node in ast.parse(old).body if wanted(node))  # type: ignore[operator]
        lines = old.splitlines(keepends=True)
        path.write_text("".join(lines[: node.lineno - 1]) + text + "".join(lines[node.end_lineno :]))


def plain(text: str) -> str:
    """One space between words, whatever columns and line breaks a table had."""
    return " ".join(text.split())


def blocks() -> list[tuple[str, str]]:
    return [(match["what"], match["text"]) for match in BLOCK.finditer(PAGE.read_text())]


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
