"""Run one stage in a process of its own: memory is returned, and a crash is told from a verdict."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotage.core.errors import StorageError

_STOP_S = 12.0  # supervise.py gives a stage 5 s to end by itself
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_ANSWERS = (0, 1, 2)  # pass, fail, not measured; anything else is a crash


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a stage's process ended.

    Attributes:
        exit_code: its exit code; 128 + n when signal n ended it.
        result: the JSON object it printed, or None.
        error: why there is no usable result, in words; empty when there is one.
        seconds: wall time.
    """

    exit_code: int
    result: dict[str, Any] | None
    error: str
    seconds: float


def environment() -> dict[str, str]:
    """The environment of a stage: standard output belongs to its JSON, so vLLM's log goes to standard error."""
    return {
        **os.environ,
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "PYTHONUNBUFFERED": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def last_line(log: Path, limit: int = 8192) -> str:
    """The last line of a log that says something, without terminal codes; empty when there is none."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    for line in reversed(re.split(r"[\r\n]+", _ANSI.sub("", text))):
        if line.strip():
            return line.strip()
    return ""


def _what_went_wrong(exit_code: int, log: Path | None) -> str:
    line = last_line(log) if log is not None else ""
    if exit_code > 128 and exit_code - 128 in signal.valid_signals():
        name = signal.Signals(exit_code - 128).name
        hint = " (often: out of memory)" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{hint}" + (f"; it last said: {line}" if line else "")
    if line.startswith("pilotage: "):  # one of our own errors: it says what, where and what to do
        return line.removeprefix("pilotage: ")
    return f"its process left with exit code {exit_code}" + (f": {line}" if line else "")


class Stopped(Exception):
    """The stage was ended because the voyage ends."""


def run(
    command: Sequence[str],
    *,
    log: Path | None,
    tick: Callable[[str], None] | None = None,
    stop: threading.Event | None = None,
    poll_s: float = 0.2,
) -> Outcome:
    """Run `command` under supervision and read the JSON object that it prints.

    Args:
        command: program and arguments.
        log: file for its standard error; None lets it through to ours.
        tick: called about five times a second with the last line of the log.
        stop: when set, from another thread, the command is ended.
        poll_s: seconds between two looks at the process.

    Raises:
        StorageError: the log cannot be written, or the stage says that the disk is full.
        Stopped: `stop` was set.
        KeyboardInterrupt: passed on after everything that the command started has ended.
    """
    supervised = [sys.executable, "-m", "pilotage.voyage.supervise", str(os.getpid()), "--", *command]
    began = time.monotonic()
    try:
        stderr = open(log, "wb") if log is not None else None  # noqa: SIM115 - closed below, after the process has it
    except OSError as error:
        raise StorageError(
            f"cannot be written ({error.strerror})", where=str(log), do="free some space or name another --run-dir"
        ) from error
    process = subprocess.Popen(
        supervised,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=environment(),
        start_new_session=True,  # Ctrl-C reaches us alone; we pass it on in order
    )
    if stderr is not None:
        stderr.close()
    assert process.stdout is not None
    printed: list[bytes] = []
    reader = threading.Thread(target=lambda pipe: printed.append(pipe.read()), args=(process.stdout,), daemon=True)
    reader.start()
    try:
        while process.poll() is None:
            if stop is not None and stop.is_set():
                raise Stopped
            if tick is not None:
                tick(last_line(log) if log is not None else "")
            time.sleep(poll_s)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        reader.join(5.0)
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return _judge(code, b"".join(printed), log, time.monotonic() - began)


def _judge(exit_code: int, printed: bytes, log: Path | None, took: float) -> Outcome:
    result, error = None, ""
    if exit_code in _ANSWERS:
        try:
            parsed = json.loads(printed)
            result = parsed if isinstance(parsed, dict) else None
        except (json.JSONDecodeError, UnicodeDecodeError):
            result = None
    if result is None:
        error = _what_went_wrong(exit_code, log)
        if "no space left on" in error.lower():
            raise StorageError(
                error,
                where=str(log.parent.parent) if log is not None else None,
                do="free some space, then run the same command again; completed stages are kept",
            )
    return Outcome(exit_code=exit_code, result=result, error=error, seconds=took)
