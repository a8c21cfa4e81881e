"""Building the compiled kernels: once, whole, and with a reason where it is not possible."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pilotage.kernels.cpu import build


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PILOTAGE_HOME", str(tmp_path))
    return tmp_path


def compiler(path: Path, body: str) -> str:
    """A compiler that has a version and otherwise does as `body` says."""
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo fake 1; exit 0; fi\n{body}\n')
    path.chmod(0o755)
    return str(path)


def reason() -> str | None:
    return build.unavailable.__wrapped__()


def test_no_compiler(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(home))
    assert reason() == "no C++ compiler was found; install g++ or name one in CXX"
    assert "CPU kernels are off, plain torch runs instead: no C++ compiler" in capsys.readouterr().err


def test_a_compiler_that_fails_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = 'echo "ops.cpp:1: fatal error: something" >&2; exit 1'
    monkeypatch.setenv("CXX", compiler(home / "c++", body))
    assert "failed: ops.cpp:1: fatal error: something" in str(reason())
    assert [path.name for path in (home / "kernels").iterdir()] == ["lock"]


def test_a_compiler_that_is_not_there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(home / "nothing"))
    assert "does not run" in str(reason())


def test_a_library_that_does_not_load(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = 'while [ "$1" != -o ]; do shift; done; echo rubbish > "$2"'
    monkeypatch.setenv("CXX", compiler(home / "c++", body))
    assert "cannot be used" in str(reason())


def test_a_home_that_cannot_be_written(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("PILOTAGE_HOME", str(home / "file"))
    monkeypatch.setenv("CXX", compiler(home / "c++", "exit 0"))
    assert "cannot be used" in str(reason())


def test_several_want_it_and_one_builds(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = f'echo x >> {home}/count; while [ "$1" != -o ]; do shift; done; sleep 0.3; echo library > "$2"'
    monkeypatch.setenv("CXX", compiler(home / "c++", body))
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: build._library(), range(4)))
    assert len(paths) == 1 and paths.pop().read_text() == "library\n"
    assert (home / "count").read_text() == "x\n"


def test_another_source_or_compiler_is_another_library(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiler(home / "c++", "exit 0")
    key = build._key(first)
    assert key == build._key(first)
    assert key != build._key(compiler(home / "d++", "exit 0"))
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-DX"))
    assert key != build._key(first)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64"], ids=["AVX2", "SSE2"])
def test_narrow_vectors_agree_too(target: str, tmp_path: Path) -> None:
    """The same parity tests on code for lesser processors."""
    if build.unavailable() is not None or build.platform.machine() != "x86_64":
        pytest.skip("needs an x86 processor and a compiler")
    tests = Path(__file__).parents[2] / "parity/test_native_kernels.py"
    flags = tuple(f"-march={target}" if flag == "-march=native" else flag for flag in build._FLAGS)
    some = "(test_linear and 257) or splits or strided or (test_chunks and 33 and sinks)"
    code = (
        f"import pilotage.kernels.cpu.build as b; b._FLAGS = {flags!r}; import pytest, sys; "
        f"sys.exit(pytest.main([{str(tests)!r}, '-q', '-x', '-k', {some!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
