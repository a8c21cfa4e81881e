"""A Python process of our own that answers questions: one JSON document a line, in and out.

`serve` is the child's side, `Child` the parent's. What a library prints in the child goes to its log, never among the
answers.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pilotage.core.errors import Unavailable


class Child:
    """The parent's side; use it as a context manager.

    Args:
        module: run as `python -m module`.
        log: file that gets everything the child prints.
        arguments: further arguments of the module.
        environment: further environment variables.
    """

    def __init__(
        self, module: str, log: Path, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        self.module, self.log = module, log
        with open(log, "wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
                text=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self.process.pid

    def send(self, question: Mapping[str, Any]) -> None:
        """Ask without waiting; each `send` wants one `receive`."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None

    def receive(self) -> dict[str, Any]:
        """Wait for an answer.

        Raises:
            Unavailable: the child failed; the end of its log is in the message.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self._died()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Unavailable(answer["error"], where=self.module, do=f"see its log:\n{self.tail()}")
        return answer

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Ask and wait."""
        self.send(question)
        return self.receive()

    def tail(self, lines: int = 15) -> str:
        """Return the end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _died(self) -> Unavailable:
        code = self.process.wait()
        return Unavailable(f"ended with code {code}; the end of its log:\n{self.tail()}", where=self.module)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(timeout=10 if kind is None else 0.5)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def serve(answer: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Answer questions on standard input until it is closed; a question that fails is answered with its error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # from here on whatever prints, prints to the log
    for line in sys.stdin:
        try:
            reply = dict(answer(json.loads(line)))
        except Exception as error:  # the parent must learn of it, whatever it is
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()
