"""A diff on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pilotage.arch.diff.compare import ArchDiff
from pilotage.arch.fields import jsonable

_COLOURS = {"same": "dim", "differs": "yellow", "absent": "cyan", "only_a": "red", "only_b": "green"}


def show(found: ArchDiff, console: Console) -> None:
    """Print a diff: the work first, then what it follows from.

    Args:
        found: the diff.
        console: where to print; its width decides how values are cut.
    """
    a, b = found.a.label, found.b.label
    console.print(f"[bold]{escape(a)}[/bold] (donor) against [bold]{escape(b)}[/bold]")
    for note in found.notes:
        console.print(f"note: {escape(note)}")
    for part in (_work(found), _checklist(found), _fields(found), _modules(found), _methods(found)):
        console.print()
        console.print(part)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", expand=True, pad_edge=False, box=None)
    for column in columns:
        table.add_column(column, overflow="fold", header_style="dim")
    return table


def _work(found: ArchDiff) -> Any:
    if not found.work_items:
        return Text("No work: nothing differs but values that the config states.", style="bold")
    table = _table(f"Work items ({len(found.work_items)})", "what", "where", "why")
    for item in found.work_items:
        table.add_row(escape(item.title), escape(_places(item.touches)), escape(item.why))
    return table


def _places(touches: str) -> str:
    """One place a line, the file once for each run of places in it."""
    lines: list[str] = []
    last = ""
    for place in touches.split("; "):
        file, _, function = place.partition(": ")
        lines.append(place if file != last else f"  {function}")
        last = file
    return "\n".join(lines)


def _checklist(found: ArchDiff) -> Table:
    table = _table("Checklist", "row", "verdict", "said by", "touches", "served by")
    for row in found.checklist:
        verdict = f"[{_COLOURS[row.verdict]}]{row.verdict}[/]"
        cells = (", ".join(row.fields), _places(row.touches), row.block if row.verdict != "same" else "")
        table.add_row(row.row, verdict, *(escape(cell) for cell in cells))
    return table


def _fields(found: ArchDiff) -> Table:
    table = _table("Config", "key", found.a.label, found.b.label)
    for key, (a, b) in sorted(found.differ.items()):
        table.add_row(key, _cut(a), _cut(b))
    for key, value in sorted(found.only_a.items()):
        table.add_row(f"[red]{escape(key)}[/]", _cut(value), "")
    for key, value in sorted(found.only_b.items()):
        table.add_row(f"[green]{escape(key)}[/]", "", _cut(value))
    return table


def _cut(value: Any, width: int = 60) -> str:
    text = str(jsonable(value))
    return escape(text if len(text) <= width else f"{text[: width - 3]}...")


def _modules(found: ArchDiff) -> Group | Table:
    changed = [row for row in found.modules if row.verdict != "same"]
    same = len(found.modules) - len(changed)
    table = _table(f"Modules ({same} the same, not shown)", "module", found.a.label, found.b.label)
    for row in changed:
        table.add_row(f"[{_COLOURS[row.verdict]}]{escape(row.path)}[/]", escape(row.a or ""), escape(row.b or ""))
    if not found.b.encoders:
        return table
    beside = ", ".join(f"{part.name} ({part.kind}, {part.num_parameters:,} parameters)" for part in found.b.encoders)
    return Group(table, Text(f"beside the language model of {found.b.label}: {beside}"))


def _methods(found: ArchDiff) -> Table:
    changed = [method for method in found.methods if method.verdict != "same"]
    same = len(found.methods) - len(changed)
    table = _table(
        f"Methods in transformers ({same} the same, not shown; --html and --json give the lines)",
        "part",
        found.a.label,
        found.b.label,
        "lines changed",
    )
    for method in changed:
        lines = sum(line[:1] in "+-" and line[:3] not in ("+++", "---") for line in method.lines)
        part = method.role if method.role != "function" else f"{method.method}()"
        table.add_row(f"[{_COLOURS[method.verdict]}]{part}[/]", method.a or "", method.b or "", str(lines or ""))
    return table
