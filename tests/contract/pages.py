"""A page of docs/, followed as it stands by someone in an empty directory: its commands, code, and what they print.

A comment before a fenced block says what the block is: `run` (with `exit N`, or `engine` for what starts an engine),
`python` (a script), `prints` (lines that the last run printed), `shows FILE` (a part of a file), `class NAME in FILE`
and `import from MODULE in FILE` (code that takes the place of the class or import there).
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

DOCS = Path(__file__).parents[2] / "docs"
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
        elif what == "python":
            (self.directory / "script.py").write_text(text)
            self.run("python script.py")
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


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return what each marked block of a page is, and its text."""
    return [(match["what"], match["text"]) for match in BLOCK.finditer(page.read_text())]
