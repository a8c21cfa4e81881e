"""Pieces of Python source: marks, import blocks, calls broken over lines the way the formatter does it."""

from __future__ import annotations

import ast
import builtins
import sys
import textwrap
from collections.abc import Iterable

from pilotage.arch.diff.work import WorkItem

WIDTH = 120


def mark(item: WorkItem, indent: str, carried: set[str]) -> str:
    """The marked place of a work item: what it is and why as a comment, and the call that fails until it is written.

    Args:
        item: the work item.
        indent: of the place.
        carried: fields that the donor's config holds; where these are all that the item reads, the comment says so.
    """
    width = WIDTH - len(indent)
    first = item.why.split()[0]
    is_code = any(letter in first for letter in "_.0123456789")
    why = item.why if is_code else f"{item.why[0].upper()}{item.why[1:]}"
    paragraphs = [f"PORT: {item.title} ({item.row}).", f"{why}."]
    if item.reads and set(item.reads) <= carried:
        fields = ", ".join(f"config.{name}" for name in item.reads)
        paragraphs.append(f"The donor has {fields} already: where its code uses that, checking it is the work.")
    comment = [
        f"# {line}"
        for paragraph in paragraphs
        for line in textwrap.wrap(paragraph, width - 2, break_long_words=False, break_on_hyphens=False)
    ]
    call = f'port("{_escaped(item.title)}")'
    if len(call) > width:
        parts = textwrap.wrap(item.title, width - 12, drop_whitespace=False, break_on_hyphens=False)
        call = "\n".join(["port(", *(f'    "{_escaped(part)}"' for part in parts), ")"])
    return textwrap.indent("\n".join([*comment, call]) + "\n", indent)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def free_names(source: str) -> set[str]:
    """Names that a piece of code reads and does not define: what it needs imported."""
    tree = ast.parse(textwrap.dedent(source))
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    known = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    known |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    known |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    return read - known - set(dir(builtins))


class Imports:
    """The imports of a file, to add to and write out in the linter's order.

    Args:
        tree: the parsed file.
        own: top-level packages that count as first party.
    """

    def __init__(self, tree: ast.Module, own: Iterable[str]) -> None:
        self.own = set(own)
        self.plain: set[str] = set()
        self.names: dict[str, set[str]] = {}
        for node in tree.body:
            if isinstance(node, ast.Import):
                self.plain |= {f"{a.name} as {a.asname}" if a.asname else a.name for a in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{a.name} as {a.asname}" if a.asname else a.name for a in node.names}
                self.names.setdefault(node.module, set()).update(names)

    def add(self, module: str, name: str) -> None:
        """Import `name` from `module`; with an empty module, `import name`."""
        if module:
            self.names.setdefault(module, set()).add(name)
        else:
            self.plain.add(name)

    def known(self) -> set[str]:
        """Every name that the imports define."""
        everything = [*self.plain, *(name for names in self.names.values() for name in names)]
        return {name.rpartition(" as ")[2].partition(".")[0] for name in everything}

    def text(self) -> str:
        """The block."""
        sections = []
        for section in range(4):
            plain = [
                f"import {name}" for name in sorted(self.plain) if self._section(name.partition(" ")[0]) == section
            ]
            modules = [module for module in sorted(self.names) if self._section(module) == section]
            lines = plain + [_from(module, self.names[module]) for module in modules]
            if lines:
                sections.append("\n".join(lines))
        return "\n\n".join(sections) + "\n"

    def _section(self, module: str) -> int:
        top = module.partition(".")[0]
        if top == "__future__":
            return 0
        return 3 if top in self.own else 1 if top in sys.stdlib_module_names else 2


def _from(module: str, names: set[str]) -> str:
    # Constants, then classes, then functions, as the linter sorts them.
    ordered = sorted(
        names, key=lambda name: (0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2, name)
    )
    line = f"from {module} import {', '.join(ordered)}"
    return line if len(line) <= WIDTH else f"from {module} import (\n" + "".join(f"    {n},\n" for n in ordered) + ")"


def call(head: str, arguments: list[str], indent: str, tail: str = ")") -> str:
    """A call on one line where it fits, else one argument a line."""
    line = f"{indent}{head}{', '.join(arguments)}{tail}\n"
    if len(line) <= WIDTH + 1:
        return line
    return f"{indent}{head}\n" + "".join(f"{indent}    {argument},\n" for argument in arguments) + f"{indent}{tail}\n"
