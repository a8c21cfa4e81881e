"""Errors of the interpreter, each with the line of the kernel that asked for the impossible."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

from pilotage.core.errors import BadInput

_INTERPRETER = str(Path(__file__).parent)
_LIBRARY = str(Path(__file__).parent / "library")


class NkiValidationError(BadInput):
    """A kernel that asks for something the hardware or the language does not have."""


def kernel_line() -> str:
    """Name the innermost line of kernel code on the stack: "file:line in function"."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_INTERPRETER) or name.startswith(_LIBRARY):
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "outside of any kernel"


def fault(what: str, *, do: str | None = None) -> NoReturn:
    """Raise `NkiValidationError` for the kernel line that is running."""
    raise NkiValidationError(what, where=kernel_line(), do=do)
