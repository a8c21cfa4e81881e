"""The command answers at once, and a user's mistake is a sentence, never a trace."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
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


def seconds_of(*command: str | Path) -> float:
    """Seconds of the processor that a command took; the clock of a busy machine says nothing."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, timeout=60, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_answers_in_half_a_second() -> None:
    assert min(seconds_of(PILOTAGE, "--help") for _ in range(3)) < 0.5


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
def test_a_mistake_is_a_sentence_and_exit_code_2(
    run: Callable[..., tuple[int, str, str]], arguments: list[str], tmp_path: Path
) -> None:
    code, printed, said = run(*[argument.format(tmp=tmp_path) for argument in arguments])
    assert code == 2, (code, printed, said)
    assert "Traceback" not in printed + said
    assert said.strip(), "says what is wrong"
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_mistake_in_a_process_of_its_own() -> None:
    done = subprocess.run([PILOTAGE, "weights", "/no/such/model"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("pilotage: /no/such/model: ") and len(done.stderr.splitlines()) == 1


def test_asked_to_end_it_ends_what_it_has_started(tmp_path: Path) -> None:
    """`timeout` sends SIGTERM, of which Python dies on the spot."""
    code = (
        "import subprocess, sys, time\n"
        "from pilotage import cli\n"
        "def verb():\n"
        "    server = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "    try:\n        print(server.pid, flush=True)\n        time.sleep(60)\n"
        "    finally:\n        server.kill()\n        server.wait()\n"
        "cli.application = lambda: verb\n"
        "cli.main()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        server = int(process.stdout.readline())
        process.terminate()
        assert process.wait(30) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)
