"""What `pilotage new` writes imports, passes the linter, and marks every work item in the function it touches."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pilotage.arch.port import PortNotWritten, port
from pilotage.arch.scaffold import Scaffold, scaffold
from pilotage.core.errors import BadInput, ConfigError

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "tests" / "data" / "configs"
MODELS = {
    "qwen3x": "tiny:qwen3",
    "qwen2x": "tiny:qwen2",
    "gemma3x": "tiny:gemma3",
    "gptossx": str(CONFIGS / "gpt-oss-20b"),
    "deepseekx": str(CONFIGS / "deepseek-v3"),
    "gemma4x": str(CONFIGS / "gemma-4-31b"),
    "mixtralx": str(CONFIGS / "mixtral-8x7b"),
    "qwenvlx": str(CONFIGS / "qwen2.5-vl-7b"),
}


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Scaffold]]:
    base = tmp_path_factory.mktemp("projects")
    return {name: (base / name, scaffold(name, model, "llama3", base / name)) for name, model in MODELS.items()}


def run(*command: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    # Run elsewhere than here: the current directory comes before PYTHONPATH.
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, cwd=tempfile.gettempdir()
    )


def marks(path: Path) -> dict[str, set[str]]:
    """Titles of the marks of a file, by the "Class.function" they stand in."""
    found: dict[str, set[str]] = {}

    def visit(node: ast.AST, place: str) -> None:
        for child in ast.iter_child_nodes(node):
            here = place
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                here = f"{place}.{child.name}" if place else child.name
            if isinstance(child, ast.Call) and ast.unparse(child.func) == "port":
                found.setdefault(place, set()).add(ast.literal_eval(child.args[0]))
            visit(child, here)

    visit(ast.parse(path.read_text()), "")
    return found


@pytest.mark.parametrize("name", MODELS)
def test_every_item_is_marked_where_it_belongs(projects: dict[str, tuple[Path, Scaffold]], name: str) -> None:
    project, made = projects[name]
    assert made.work_items
    expected: dict[tuple[str, str], set[str]] = {}
    for item in made.work_items:
        for file, function in item.places:
            expected.setdefault((file, function), set()).add(item.title)
    got: dict[tuple[str, str], set[str]] = {}
    for file in ("config.py", "model.py", "weights.py"):
        for place, titles in marks(project / name / file).items():
            # The classes carry the model's prefix: Qwen3Attention.forward is Attention.forward.
            role = re.sub(
                r"^\w*?(Attention|MLP|DecoderLayer|Model|ForCausalLM|ForConditionalGeneration|Config)\.", r"\1.", place
            )
            got[file, role.replace("ForConditionalGeneration.", "ForCausalLM.")] = titles
    assert got == expected


@pytest.mark.parametrize("name", MODELS)
def test_it_passes_the_linter(projects: dict[str, tuple[Path, Scaffold]], name: str) -> None:
    project, _ = projects[name]
    config = ("--config", str(project / "pyproject.toml"))
    for command in (("check", *config), ("format", "--check", "--diff", *config)):
        result = run(sys.executable, "-m", "ruff", *command, str(project))
        assert result.returncode == 0, result.stdout + result.stderr


def test_they_import(projects: dict[str, tuple[Path, Scaffold]]) -> None:
    paths = os.pathsep.join(str(project) for project, _ in projects.values())
    code = "".join(f"import {name}, {name}.factory\n" for name in projects)
    code += "print(qwen3x.Qwen3ForCausalLM.config_class.__name__, deepseekx.__all__)"
    result = run(sys.executable, "-c", code, path=Path(paths))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[0] == "Qwen3Config" and "DeepseekV3ForCausalLM" in result.stdout


def test_config_reads_what_the_items_need(projects: dict[str, tuple[Path, Scaffold]]) -> None:
    text = (projects["gemma3x"][0] / "gemma3x" / "config.py").read_text()
    assert "    embedding_scale: float\n" in text and "embedding_scale=spec.embedding_scale" in text
    assert '"norm_weight_offset"' in text and 'layer_types=("sliding_attention", "full_attention")' in text
    assert "kv_lora_rank: int" in (projects["deepseekx"][0] / "deepseekx" / "config.py").read_text()


def test_no_name_of_the_donor_is_left(projects: dict[str, tuple[Path, Scaffold]]) -> None:
    for name, (project, _) in projects.items():
        for path in (project / name).glob("*.py"):
            code = "\n".join(line for line in path.read_text().splitlines() if not line.strip().startswith("#"))
            assert not re.search(r"\bLlama\w*\b|models\.llama3", code), path


def test_its_tests_fail_for_the_stated_reason(projects: dict[str, tuple[Path, Scaffold]]) -> None:
    project, made = projects["qwen3x"]
    result = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(made.tests), path=project)
    assert result.returncode == 1
    assert "5 failed" in result.stdout
    # One test lists the places, the others stop at the first of them.
    assert len(re.findall(r"model\.py:\d+ QK-norm", result.stdout)) >= 2
    assert len(re.findall(r"^E .*PortNotWritten: .*not written yet: QK-norm", result.stdout, re.M)) == 4
    assert "Qwen3Attention.__init__" in result.stdout


def source_tree(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "pilotage", tmp_path / "pilotage", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_in_the_tree(tmp_path: Path) -> None:
    root = source_tree(tmp_path)
    made = scaffold("gemma5", MODELS["gemma4x"], root=root)
    assert made.package == "pilotage.models.gemma5"
    assert (root / "pilotage/models/gemma5/README.md").is_file()
    assert made.tests == root / "tests/parity/test_gemma5.py" and made.tests.is_file()
    assert "added to pilotage/models/registry.py" in made.notes[0]
    code = (
        "from pilotage.models import registry\n"
        "entry = registry.find(['Gemma4ForConditionalGeneration'])\n"
        "print(entry.origin, entry.load().__module__)\n"
    )
    result = run(sys.executable, "-c", code, path=root)
    assert result.stdout.split() == ["pilotage", "pilotage.models.gemma5.factory"], result.stderr
    for command in (("check",), ("format", "--check")):
        written = [str(path) for path in made.files if path.suffix == ".py"]
        result = run(sys.executable, "-m", "ruff", *command, "--config", str(root / "pyproject.toml"), *written)
        assert result.returncode == 0, result.stdout


def test_an_architecture_that_is_served_keeps_its_entry(tmp_path: Path) -> None:
    root = source_tree(tmp_path)
    before = (root / "pilotage/models/registry.py").read_text()
    made = scaffold("qwen3x", "tiny:qwen3", root=root)
    assert "pilotage.models.qwen3" in made.notes[0] and "left as it is" in made.notes[0]
    assert (root / "pilotage/models/registry.py").read_text() == before


def test_other_donors(tmp_path: Path) -> None:
    made = scaffold("olmox", "tiny:gemma3", "qwen3", tmp_path)
    titles = {item.title for item in made.work_items}
    assert "QK-norm" not in titles and "Scaled embedding" in titles
    assert "class Gemma3Attention" in (tmp_path / "olmox" / "model.py").read_text()


def test_a_model_like_its_donor_has_no_work(tmp_path: Path) -> None:
    made = scaffold("smolx", str(CONFIGS / "llama-3-8b"), "llama3", tmp_path)
    assert not made.work_items
    assert "port(" not in (tmp_path / "smolx" / "model.py").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("Qwen-3", "tiny:qwen3"), "not a package name"),
        (("class", "tiny:qwen3"), "not a package name"),
        (("json", "tiny:qwen3"), "installed already"),
        (("qwen3x", "tiny:qwen3", "llama9"), "use one of .*llama3"),
        (("qwen3x", "tiny:qwen9"), "qwen3"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    name, model, *donor = arguments
    with pytest.raises(BadInput, match=said):
        scaffold(name, model, donor[0] if donor else "llama3", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    scaffold("qwen3x", "tiny:qwen3", "llama3", tmp_path)
    (tmp_path / "qwen3x" / "model.py").write_text("mine\n")
    with pytest.raises(BadInput, match="--force"):
        scaffold("qwen3x", "tiny:qwen3", "llama3", tmp_path)
    assert (tmp_path / "qwen3x" / "model.py").read_text() == "mine\n"
    scaffold("qwen3x", "tiny:qwen3", "llama3", tmp_path, force=True)
    assert "port(" in (tmp_path / "qwen3x" / "model.py").read_text()


def test_a_config_without_an_architecture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3", "text_config": {"num_hidden_layers": 2}}')
    with pytest.raises(ConfigError, match="no architectures"):
        scaffold("gemmax", str(tmp_path / "config.json"), "llama3", tmp_path / "out")


def test_without_a_source_tree(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--out"):
        scaffold("qwen3x", "tiny:qwen3", root=tmp_path)


def test_port_names_the_item_and_the_place() -> None:
    with pytest.raises(PortNotWritten, match=r"test_scaffold\.py:\d+, .*not written yet: QK-norm") as caught:
        port("QK-norm")
    assert caught.value.item == "QK-norm"
