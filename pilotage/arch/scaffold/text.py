"""What was scaffolded, on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from pilotage.arch.scaffold.package import Scaffold


def show(made: Scaffold, console: Console) -> None:
    """Print the files, the marked places and what to do next."""
    for path in made.files:
        console.print(f"written  {escape(str(path))}", soft_wrap=True)
    console.print()
    if made.work_items:
        count = len(made.work_items)
        console.print(f"[bold]{count} work item{'s' if count > 1 else ''}[/bold], marked with port():")
        for item in made.work_items:
            console.print(f"  {escape(item.title)}  [dim]{escape(item.touches)}[/dim]", soft_wrap=True)
    else:
        console.print("No work items: the donor's code serves this model as it is.")
    for note in made.notes:
        console.print(f"note: {escape(note)}", soft_wrap=True)
    console.print(f"\nnext: pytest {escape(str(made.tests))}", soft_wrap=True)
