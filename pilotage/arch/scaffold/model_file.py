"""model.py of a new package: the donor's, renamed, with the marked places."""

from __future__ import annotations

import ast
import re
import textwrap

from pilotage.arch.diff.work import WorkItem
from pilotage.arch.scaffold.code import Imports, free_names, mark
from pilotage.arch.scaffold.donor import Donor, Module
from pilotage.arch.scaffold.names import Names

_DOCS = {
    "MLP": "The feed-forward block.",
    "Model": "The backbone: embedding, layers, final norm.",
    "Attention": "Attention.",
    "DecoderLayer": "One layer.",
}


def model_file(donor: Donor, names: Names, items: list[WorkItem]) -> str:
    """Write model.py.

    Args:
        donor: the package to copy.
        names: what its names become.
        items: the work items; those that touch model.py are marked.
    """
    module = donor.files["model.py"]
    places = _places(items)
    editor = _Editor(donor, module)
    for role in {role for role, _ in places}:
        if donor.role(role) is None:
            editor.add_class(role)
    for (role, method), found in places.items():
        editor.mark(role, method, found)
    return _documented(names.rename(editor.text(names)), names)


def _documented(text: str, names: Names) -> str:
    """The donor's introduction cites the donor's paper: put a plain one in its place."""
    first = ast.parse(text).body[0]
    if not isinstance(first, ast.Expr):
        return text
    source = names.modeling or "the modelling source"
    introduction = (
        f'"""{names.prefix}: the architecture.\n\n'
        f"Started from {names.donor.name}; follows {source} of transformers.\n"
        f'Module names and weight layouts are Hugging Face\'s.\n"""\n'
    )
    return introduction + "".join(text.splitlines(keepends=True)[first.end_lineno or 1 :])


def _places(items: list[WorkItem]) -> dict[tuple[str, str], list[WorkItem]]:
    places: dict[tuple[str, str], list[WorkItem]] = {}
    for item in items:
        for file, function in item.places:
            if file == "model.py":
                role, _, method = function.partition(".")
                places.setdefault((role, method), []).append(item)
    return places


class _Editor:
    """Collects insertions into the donor's model.py, in the donor's names; `text` applies them."""

    def __init__(self, donor: Donor, module: Module) -> None:
        self.donor = donor
        self.module = module
        self.lines = module.text.splitlines(keepends=True)
        # Text to put before a line (1-based), and new methods and classes by the class they belong to or precede.
        self.before: dict[int, list[str]] = {}
        self.methods: dict[str, dict[str, str]] = {}
        self.new: dict[str, tuple[str, str]] = {}
        self.replaced: list[tuple[str, str, str]] = []
        self.needs: set[str] = set()
        self.sources: list[Module] = [module, *donor.common]

    def add_class(self, role: str) -> None:
        """Give the package a class of its own where it uses a shared one, and let it be built."""
        built = self.donor.builds(role)
        if built is None or not isinstance(built[2].func, ast.Name):
            return
        parent, attribute, call = built
        base = ast.unparse(call.func)
        name = f"{self.donor.prefix}{role}"
        self.new[role] = (name, base)
        self.needs.add(base)
        owner = self.donor.role(parent)
        assert owner is not None
        own_init = next((m for m in owner.body if isinstance(m, ast.FunctionDef) and m.name == "__init__"), None)
        if own_init is not None:
            self.replaced.append((owner.name, f"{base}(", f"{name}("))
        else:
            arguments = ast.unparse(call).partition("(")[2].rpartition(")")[0]
            self._method(parent, "__init__", extra=f"self.{attribute} = {name}({arguments})\n")

    def mark(self, role: str, method: str, items: list[WorkItem]) -> None:
        """Put the marks of `items` at the top of a method, writing the method out where it is inherited."""
        owner = self.donor.role(role)
        own = None
        if owner is not None:
            own = next((m for m in owner.body if isinstance(m, ast.FunctionDef) and m.name == method), None)
        if own is not None:
            first = own.body[1] if _has_docstring(own) and len(own.body) > 1 else own.body[0]
            at = first.lineno
            if method == "__init__" and "super().__init__" in ast.unparse(first) and first.end_lineno:
                at = first.end_lineno + 1  # modules can only be assigned after it
            indent = " " * first.col_offset
            self.before.setdefault(at, []).extend(mark(item, indent, self.donor.config_fields()) for item in items)
            self.needs.add("port")
        else:
            self._method(role, method, marks=items)

    def _method(self, role: str, method: str, marks: list[WorkItem] | None = None, extra: str = "") -> None:
        """Write an inherited method out in the class of `role`; a constructor only calls its base."""
        owner = self.donor.role(role)
        name = owner.name if owner is not None else self.new[role][0]
        base = name if owner is not None else self.new[role][1]
        found = self.donor.method(base, method)
        if found is None:
            return
        module, node = found
        written = self.methods.setdefault(name, {})
        text = written.get(method) or _written_out(module, node, method)
        marked = "".join(mark(item, " " * 8, self.donor.config_fields()) for item in marks or [])
        head, body = _split(text, constructor=method == "__init__")
        written[method] = head + marked + textwrap.indent(extra, " " * 8) + body
        self.needs |= free_names(text) | ({"port"} if marks else set())

    def text(self, names: Names) -> str:
        """The file with everything inserted, imports completed."""
        lines = list(self.lines)
        classes = self.module.classes()
        for name, methods in self.methods.items():
            if name in classes:
                for method, text in methods.items():
                    self._insert(classes[name], method, text)
        for role, (name, base) in self.new.items():
            text = f'class {name}({base}):\n    """{_DOCS[role]}"""\n'
            for _, method in sorted(self.methods.get(name, {}).items(), key=lambda pair: pair[0] != "__init__"):
                text += f"\n{method}"
            parent = "ForCausalLM" if role == "Model" else "DecoderLayer"
            owner = self.donor.role(parent)
            assert owner is not None
            self.before.setdefault(owner.lineno, []).insert(0, text + "\n\n")
        for owner_name, old, new in self.replaced:
            node = classes[owner_name]
            for i in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[i] = lines[i].replace(old, new)
        for at in sorted(self.before, reverse=True):
            if at > len(lines):
                lines.extend(self.before[at])
            else:
                lines.insert(at - 1, "".join(self.before[at]))
        return self._with_imports("".join(lines), names)

    def _insert(self, owner: ast.ClassDef, method: str, text: str) -> None:
        """Put a new method into a class: a constructor before the other methods, anything else at the end."""
        first = next((part for part in owner.body if isinstance(part, ast.FunctionDef)), None)
        if method == "__init__" and first is not None:
            at = min([first.lineno, *(decorator.lineno for decorator in first.decorator_list)])
            self.before.setdefault(at, []).insert(0, f"{text}\n")
        elif method == "__init__":
            self.before.setdefault((owner.end_lineno or 0) + 1, []).insert(0, f"\n{text}")
        else:
            self.before.setdefault((owner.end_lineno or 0) + 1, []).append(f"\n{text}")

    def _with_imports(self, text: str, names: Names) -> str:
        tree = ast.parse(text)
        imports = Imports(tree, own=("pilotage", names.package.partition(".")[0]))
        defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        for name in sorted(self.needs - imports.known() - defined):
            if name == "port":
                imports.add("pilotage.arch.port", "port")
                continue
            origin = next((found for module in self.sources if (found := module.origin(name))), None)
            if origin is not None:
                shared = origin[0].startswith("pilotage.models.common.") and name in _reexported(self.donor)
                imports.add("pilotage.models.common" if shared else origin[0], origin[1])
        body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        start, end = body[0].lineno, body[-1].end_lineno or body[-1].lineno
        lines = text.splitlines(keepends=True)
        return "".join(lines[: start - 1]) + names.renamed_imports(imports) + "".join(lines[end:])


def _reexported(donor: Donor) -> set[str]:
    package = next((module for module in donor.common if module.name.endswith(".__init__")), None)
    return set(re.findall(r'"(\w+)"', package.text.partition("__all__")[2])) if package else set()


def _has_docstring(function: ast.FunctionDef) -> bool:
    first = function.body[0]
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)


def _written_out(module: Module, node: ast.FunctionDef, method: str) -> str:
    if method != "__init__":
        return textwrap.indent(textwrap.dedent(module.source(node)), "    ")
    arguments = [argument.arg for argument in node.args.args[1:]]
    keywords = [f"{argument.arg}={argument.arg}" for argument in node.args.kwonlyargs]
    lines = textwrap.dedent(module.source(node)).splitlines()
    signature_end = node.body[0].lineno - node.lineno
    head = "\n".join(lines[:signature_end])
    return textwrap.indent(f"{head}\n    super().__init__({', '.join([*arguments, *keywords])})\n", "    ")


def _split(text: str, *, constructor: bool) -> tuple[str, str]:
    """A method's text before and after the point where marks go: after the docstring, or after super().__init__."""
    function = ast.parse(textwrap.dedent(text)).body[0]
    assert isinstance(function, ast.FunctionDef)
    lines = text.splitlines(keepends=True)
    at = 0
    if constructor:
        at = next((s.end_lineno or 0 for s in function.body if "super().__init__" in ast.unparse(s)), 0)
    if not at:
        first = function.body[1] if _has_docstring(function) and len(function.body) > 1 else function.body[0]
        at = first.lineno - 1
    return "".join(lines[:at]), "".join(lines[at:])
