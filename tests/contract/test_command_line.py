"""The command answers at once, and a user's mistake is a sentence, never a trace."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

PILOTAGE = Path(sys.executable).with_name("pilotage")
VERBS = [
    *(
        "diff",
        "new",
        "weights",
        "smoke",
        "validate",
        "bench",
        "onboard",
        "doctor",
        "report",
        "compare",
        "kernels",
        "invariance",
    ),
    *("train", "consistency"),
]


def run(*args: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PILOTAGE, *args], capture_output=True, text=True, timeout=timeout, check=False)


def test_help_answers_in_half_a_second() -> None:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        assert run("--help").returncode == 0
        times.append(time.perf_counter() - start)
    assert min(times) < 0.5, times


@pytest.mark.parametrize("verb", VERBS)
def test_help_imports_neither_torch_nor_vllm(verb: str) -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['pilotage', {verb!r}, '--help']\n"
        "from pilotage.cli import main\n"
        "try:\n    main()\nexcept SystemExit as done:\n    assert done.code == 0, done.code\n"
        "heavy = {'torch', 'vllm', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "MODEL" in done.stdout or verb in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["weights", "/no/such/model"],
        ["diff", "/no/such/model", "tiny:llama3"],
        ["smoke", "tiny:lama3"],
        ["validate", "/no/such/model"],
        ["bench", "/no/such/model"],
        ["onboard", "/no/such/model", "--run-dir", "{tmp}/run"],
        ["report", "/no/such/run"],
        ["compare", "/no/such/run", "/no/other"],
        ["invariance", "/no/such/model"],
        ["train", "/no/such/recipe.yaml"],
        ["consistency", "/no/such/model"],
        ["kernels", "check", "rms_nrom"],
        ["kernels", "explain", "rms_norm", "--shape", "a,b"],
        ["weights"],
        ["no-such-verb"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_a_mistake_is_a_sentence_and_exit_code_2(arguments: list[str], tmp_path: Path) -> None:
    done = run(*[argument.format(tmp=tmp_path) for argument in arguments], timeout=120)
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.strip(), "says what is wrong"
    assert not (tmp_path / "run" / "report.html").exists()
