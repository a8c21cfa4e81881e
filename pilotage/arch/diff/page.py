"""A diff as one HTML page that needs nothing else: no script, no request."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from pilotage.arch.diff.compare import ArchDiff
from pilotage.arch.diff.tree import lines
from pilotage.arch.fields import jsonable


def page(found: ArchDiff) -> str:
    """Render a diff as an HTML document."""
    import jinja2

    template = resources.files(__package__).joinpath("page.html.j2").read_text()
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["value"] = _value
    return environment.from_string(template).render(
        d=found,
        trees=[(side, lines(side.tree) if side.tree else [side.tree_error or ""]) for side in (found.a, found.b)],
        modules=[row for row in found.modules if row.verdict != "same"],
        num_same_modules=sum(row.verdict == "same" for row in found.modules),
        methods=[method for method in found.methods if method.verdict != "same"],
        num_same_methods=sum(method.verdict == "same" for method in found.methods),
        version=_version(),
    )


def _value(value: Any) -> str:
    return json.dumps(jsonable(value), ensure_ascii=False)


def _version() -> str:
    from importlib.metadata import version

    return f"pilotage {version('pilotage')}, transformers {version('transformers')}"
