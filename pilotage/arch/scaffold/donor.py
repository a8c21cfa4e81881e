"""The source of a donor's package, read as text: classes, what they inherit, where names come from."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pilotage
from pilotage.core.errors import BadInput

MODELS = Path(pilotage.__file__).parent / "models"
_ROLES = ("ForCausalLM", "DecoderLayer", "Attention", "MLP", "Model")


@dataclass(frozen=True)
class Module:
    """A parsed source file.

    Attributes:
        path: the file.
        name: its dotted module name.
        text: its content.
        tree: the parsed content.
    """

    path: Path
    name: str
    text: str
    tree: ast.Module

    @classmethod
    def read(cls, path: Path, name: str) -> Module:
        text = path.read_text()
        return cls(path, name, text, ast.parse(text))

    def classes(self) -> dict[str, ast.ClassDef]:
        """Classes defined at the top level, by name."""
        return {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}

    def source(self, node: ast.stmt) -> str:
        """A statement's text, decorators included, with its indentation."""
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        return "\n".join(self.text.splitlines()[first - 1 : node.end_lineno]) + "\n"

    def origin(self, name: str) -> tuple[str, str] | None:
        """Where a top-level name of this file comes from: (module, name), the module empty for `import name`."""
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return node.module, alias.name
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return "", f"{alias.name} as {alias.asname}" if alias.asname else alias.name
            elif name in _defined(node):
                return self.name, name
        return None


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    return [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]


@dataclass(frozen=True)
class Donor:
    """A model package to copy.

    Attributes:
        name: directory name, e.g. "llama3".
        files: its Python files by name.
        common: the modules of `models/common`, where inherited classes are.
    """

    name: str
    files: dict[str, Module]
    common: tuple[Module, ...]

    @classmethod
    def read(cls, name: str) -> Donor:
        """Read a package under `pilotage/models`.

        Raises:
            BadInput: no such package, or one without the files of a model.
        """
        packages = sorted(path.parent.name for path in MODELS.glob("*/model.py"))
        if name not in packages:
            raise BadInput(
                f"no model package {name!r} to copy", where="--donor", do=f"use one of {', '.join(packages)}"
            )
        directory = MODELS / name
        dotted = f"pilotage.models.{name}"
        files = {path.name: Module.read(path, f"{dotted}.{path.stem}") for path in sorted(directory.glob("*.py"))}
        missing = [file for file in ("config.py", "model.py", "factory.py", "weights.py") if file not in files]
        if missing:
            raise BadInput(f"the package has no {', '.join(missing)}", where=str(directory))
        shared = sorted((MODELS / "common").glob("*.py"))
        return cls(name, files, tuple(Module.read(path, f"pilotage.models.common.{path.stem}") for path in shared))

    @property
    def architecture(self) -> str:
        """The class it serves, e.g. "LlamaForCausalLM"."""
        return next(name for name in self.files["model.py"].classes() if name.endswith("ForCausalLM"))

    @property
    def prefix(self) -> str:
        """What its class names start with."""
        return self.architecture.removesuffix("ForCausalLM")

    @property
    def config_class(self) -> str:
        """Name of its config class."""
        return next(name for name in self.files["config.py"].classes() if name.endswith("Config"))

    def role(self, role: str) -> ast.ClassDef | None:
        """Its own class of a role ("Attention", "MLP", "DecoderLayer", "Model", "ForCausalLM")."""
        classes = self.files["model.py"].classes()
        named = classes.get(f"{self.prefix}{role}")
        return named or next((node for name, node in classes.items() if name.endswith(role)), None)

    def find(self, name: str) -> tuple[Module, ast.ClassDef] | None:
        """A class by name, in the package's model.py or in `models/common`."""
        for module in (self.files["model.py"], *self.common):
            if name in module.classes():
                return module, module.classes()[name]
        return None

    def method(self, class_name: str, method: str) -> tuple[Module, ast.FunctionDef] | None:
        """A method of a class or of the nearest base that has it."""
        found = self.find(class_name)
        while found is not None:
            module, node = found
            own = next((m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == method), None)
            if own is not None:
                return module, own
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            found = next((self.find(base) for base in bases if self.find(base)), None)
        return None

    def config_fields(self) -> set[str]:
        """Fields that its config holds already, its own and inherited."""
        modules = (self.files["config.py"], *self.common)
        bodies = [part for module in modules for node in module.classes().values() for part in node.body]
        return {p.target.id for p in bodies if isinstance(p, ast.AnnAssign) and isinstance(p.target, ast.Name)}

    def refusable(self) -> set[str]:
        """Fields that `read` refuses unless a model says that it goes beyond."""
        for module in self.common:
            for node in module.tree.body:
                target = getattr(node, "target", None) or next(iter(getattr(node, "targets", [])), None)
                value = getattr(node, "value", None)
                if isinstance(target, ast.Name) and target.id == "PLAIN" and isinstance(value, ast.Dict):
                    return {str(ast.literal_eval(key)) for key in value.keys if key is not None}
        return set()

    def builds(self, role: str) -> tuple[str, str, ast.Call] | None:
        """Which class the package uses for a role that it has no class of its own for.

        Returns:
            (role of the class that builds it, attribute, the call), e.g. ("DecoderLayer", "mlp", GatedMLP(...)).
        """
        places = {
            "MLP": ("DecoderLayer", "mlp"),
            "Attention": ("DecoderLayer", "self_attn"),
            "Model": ("ForCausalLM", "model"),
        }
        if role not in places:
            return None
        parent, attribute = places[role]
        owner = self.role(parent)
        init = self.method(owner.name, "__init__") if owner else None
        for node in ast.walk(init[1]) if init else ():
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                target = node.targets[0]
                if isinstance(target, ast.Attribute) and target.attr == attribute:
                    return parent, attribute, node.value
        return None


def roles() -> tuple[str, ...]:
    """The roles of classes in a model.py, outermost first."""
    return _ROLES
