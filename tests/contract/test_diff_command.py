"""`pilotage diff` as a user meets it: two config files, no weights, no network, an answer in seconds."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]
PILOTAGE = Path(sys.executable).with_name("pilotage")
CONFIGS = Path(__file__).parents[1] / "data" / "configs"


def in_its_own_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(PILOTAGE), "diff", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "160"} | environment,
        timeout=120,
        check=False,
    )


def test_two_config_files_are_enough_and_quick(tmp_path: Path) -> None:
    """The guide's own pair, from copies of the files that have nothing beside them, with an empty home."""
    for name in ("llama-3.1-8b", "gemma-4-31b"):
        shutil.copy(CONFIGS / name / "config.json", tmp_path / f"{name}.json")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = in_its_own_process(
        str(tmp_path / "llama-3.1-8b.json"),
        str(tmp_path / "gemma-4-31b.json"),
        "--json",
        HOME=str(tmp_path / "home"),
        HTTPS_PROXY="http://127.0.0.1:9",
        OMP_NUM_THREADS="1",
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["models"][0].endswith("llama-3.1-8b.json")
    assert {"title", "row", "touches", "why"} == set(found["work_items"][0])
    # Seconds of the processor, because the clock of a busy machine says nothing; the bound on the clock is 12 s.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 12


def test_the_terminal_and_the_page(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.html"
    monkeypatch.setenv("COLUMNS", "160")
    code, _, _ = run("diff", str(CONFIGS / "llama-3-8b"), str(CONFIGS / "gemma-3-270m"), "--html", str(page))
    assert code == 0 and "Two RoPE bases" in page.read_text()
    code, printed, _ = run("diff", str(CONFIGS / "llama-3-8b"), str(CONFIGS / "gemma-3-270m"))
    assert code == 0
    for words in ("Work items (10)", "Scaled embedding", "layers.0-31 | model.layers.0-17", "Heterogeneous layers"):
        assert words in printed
    assert len(printed.splitlines()) < 130


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("google/gemma-4-31B-it", "a config.json is enough"),
        ("{tmp}/none.json", "no such file"),
        ("{tmp}/torn.json", "not valid JSON"),
        ("{tmp}/new.json", "unknown to transformers"),
    ],
)
def test_what_cannot_be_compared_is_a_sentence(run: Run, tmp_path: Path, model: str, said: str) -> None:
    (tmp_path / "torn.json").write_text('{"model_type": "llama",')
    (tmp_path / "new.json").write_text('{"model_type": "never_heard_of"}')
    code, printed, told = run("diff", str(CONFIGS / "llama-3-8b"), model.format(tmp=tmp_path))
    assert code == 2
    assert said in told and len(told.splitlines()) == 1, told
    assert printed == ""


def test_a_mistake_is_found_before_anything_slow_is_done(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pilotage.core.errors import BadInput\nfrom pilotage.arch.diff import diff\n"
        f"try:\n    diff({str(CONFIGS / 'llama-3-8b')!r}, {str(tmp_path / 'none.json')!r})\n"
        "except BadInput:\n    sys.exit(3 if 'torch' in sys.modules else 0)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
