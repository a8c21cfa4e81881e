"""The errors a user can meet.

Every one says what is wrong, where, and what to do about it. The command line prints it without a stack trace and
leaves with `exit_code`; anything that is not a `PilotageError` is our own fault and keeps its trace.
"""

from __future__ import annotations

EXIT_PASS = 0
EXIT_FAIL = 1
EXIT_NOT_MEASURED = 2  # could not be measured, or bad usage


class PilotageError(Exception):
    """Something the user can act on.

    Args:
        what: what is wrong, with the numbers or names that show it.
        where: the file, key, module or option concerned.
        do: the action that would help.
    """

    exit_code = EXIT_NOT_MEASURED

    def __init__(self, what: str, *, where: str | None = None, do: str | None = None) -> None:
        self.what = what
        self.where = where
        self.do = do
        super().__init__(what, where, do)

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}; {self.do}" if self.do else text


class BadInput(PilotageError):
    """A file, argument or prompt that cannot be used as given."""


class ConfigError(PilotageError):
    """A configuration key or value that is unknown, invalid or contradictory."""


class WeightError(PilotageError):
    """A checkpoint that does not match the model: missing, extra, misshapen or doubly used tensors."""


class Unavailable(PilotageError):
    """A package, target, hub or device that this machine lacks."""


class Unsupported(PilotageError):
    """A model, option or combination that pilotage refuses rather than serve wrongly."""


class StorageError(PilotageError):
    """A write that could not be completed; nothing half-written is left under its final name."""
