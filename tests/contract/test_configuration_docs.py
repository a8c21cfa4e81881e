"""docs/configuration.md says what the code does, and says all of it."""

from __future__ import annotations

import re
from pathlib import Path

from pilotage.core import config_docs

ROOT = Path(__file__).parents[2]
# How processes of one engine talk to each other; not for users.
INTERNAL = {"PILOTAGE_COMPILED_DIRECTORY", "PILOTAGE_ERROR_FILE", "PILOTAGE_NUM_THREADS_CHOSEN"}


def test_the_page_is_what_the_code_generates() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == config_docs.text(), (
        "run: python -m pilotage.core.config_docs > docs/configuration.md"
    )


def test_every_environment_variable_is_documented() -> None:
    read = set()
    for file in sorted((ROOT / "pilotage").rglob("*.py")):
        if file.name != "config_docs.py":
            read |= set(re.findall(r"\"((?:PILOTAGE|VLLM_NEURON)_[A-Z_]+)\"", file.read_text()))
    page = config_docs.text()
    missing = {name for name in read - INTERNAL if f"`{name}`" not in page}
    assert not missing
    unread = {name for name in re.findall(r"`((?:PILOTAGE|VLLM_NEURON)_[A-Z_]+)`", page) if name not in read}
    assert not unread, "documented, but nothing reads it"
