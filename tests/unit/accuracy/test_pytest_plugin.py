"""The pytest plugin, run as its users run it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

OWN = """
def test_module(pilotage_module):
    assert pilotage_module.entries()
    pilotage_module.assert_close()


def test_norms(pilotage_modules, pilotage_checkpoint):
    assert (pilotage_checkpoint / "config.json").is_file()
    pilotage_modules.assert_close("layers.*.input_layernorm", "norm", dtype="bfloat16")


def test_something_else():
    raise AssertionError("asks for no model")
"""


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_without_a_test_file_every_module_is_a_test(tmp_path: Path) -> None:
    code, said = run(
        tmp_path,
        "--pilotage-model",
        "tiny:qwen3",
        "--pilotage-dtype",
        "float32",
        "--pilotage-module",
        "layers.[0-1].mlp",
    )
    assert code == 0, said
    assert re.search(r"PASSED .*module\[tiny:qwen3-float32-layers\.0\.mlp\]", said)
    assert "2 passed" in said


def test_fixtures_in_a_packages_own_tests(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(OWN)
    code, said = run(tmp_path, "--pilotage-model", "tiny:gemma3", "--pilotage-weights", "perturbed")
    assert code == 0, said
    assert "1 deselected" in said
    passed = set(re.findall(r"PASSED test_own\.py::test_module\[tiny:gemma3-(\w+)-([\w.]+)\]", said))
    assert {dtype for dtype, _ in passed} == {"float32", "bfloat16"}
    assert {"embed_tokens", "layers.0.self_attn", "layers.0.mlp", "norm", "rotary_emb"} <= {name for _, name in passed}


@pytest.mark.slow
def test_a_planted_fault_is_a_failed_test_of_its_module(tmp_path: Path) -> None:
    """The package's conftest scales the MLP's output by 1%."""
    (tmp_path / "conftest.py").write_text(
        "import pytest\n"
        "from pilotage.models.common import blocks\n"
        "@pytest.fixture(scope='session', autouse=True)\n"
        "def planted():\n"
        "    real = blocks.GatedMLP.forward\n"
        "    blocks.GatedMLP.forward = lambda self, *a, **k: real(self, *a, **k) * 1.01\n"
        "    yield\n"
    )
    (tmp_path / "test_own.py").write_text(OWN.split("def test_norms")[0])
    code, said = run(
        tmp_path,
        "--pilotage-model",
        "tiny:qwen3",
        "--pilotage-dtype",
        "float32",
        "--pilotage-module",
        "layers.0.mlp",
        "--pilotage-module",
        "layers.0.input_layernorm",
    )
    assert code == 1, said
    assert re.search(r"FAILED test_own\.py::test_module\[tiny:qwen3-float32-layers\.0\.mlp\]", said)
    assert re.search(r"PASSED test_own\.py::test_module\[tiny:qwen3-float32-layers\.0\.input_layernorm\]", said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--pilotage-model", "tiny:gema3"), "gemma3"),
        (("--pilotage-model", "tiny:gemma3", "--pilotage-module", "layers.*.mpl"), "the nearest is 'layers.5.mlp'"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    code, said = run(tmp_path, *arguments)
    assert code == 4
    assert says in said and "Traceback" not in said


def test_without_the_option_nothing_changes(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(OWN.replace('raise AssertionError("asks for no model")', "pass"))
    code, said = run(tmp_path)
    assert code == 0
    assert "1 passed" in said and "skipped" in said
