"""Marked places of a scaffolded model package."""

from __future__ import annotations

import inspect

from pilotage.core.errors import Unsupported


class PortNotWritten(Unsupported):
    """A place of a scaffolded model that still has to be written.

    Attributes:
        item: title of the work item, as `pilotage diff` lists it.
    """

    def __init__(self, item: str, where: str) -> None:
        self.item = item
        super().__init__(
            f"not written yet: {item}", where=where, do="write it there, then delete the call of port() and its comment"
        )


def port(item: str) -> None:
    """Stand for code that the new model needs and the donor's code does not have.

    Args:
        item: title of the work item.

    Raises:
        PortNotWritten: always, with the place of the call.
    """
    frame = inspect.currentframe()
    caller = frame.f_back if frame else None
    where = "a scaffolded model"
    if caller is not None:
        code = caller.f_code
        where = f"{code.co_filename}:{caller.f_lineno}, {code.co_qualname}"
    raise PortNotWritten(item, where)
