"""Read the Hugging Face modelling source of a config, without importing it.

Some facts of an architecture are in no config field: Gemma multiplies its embeddings by sqrt(hidden_size) and stores
norm weights minus one; only the source says so. Parsing the file costs milliseconds, importing it seconds.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ClassSource:
    """One class of a modelling file.

    Attributes:
        name: the class's name.
        bases: names of its base classes, as written.
        methods: its methods, by name.
        uses: names of other classes of the same file that its body mentions, in order of appearance.
        node: the parsed class.
    """

    name: str
    bases: tuple[str, ...]
    methods: dict[str, ast.FunctionDef]
    uses: tuple[str, ...]
    node: ast.ClassDef


@dataclass(frozen=True, kw_only=True)
class ModelingSource:
    """The classes of one modelling file that a language model is made of.

    Attributes:
        path: the file.
        root: the outermost class, e.g. "Gemma3ForCausalLM".
        classes: `root` and every class of the file that it is built from, directly or not, by name.
        functions: the file's functions that these classes call, directly or not, by name.
    """

    path: Path
    root: str
    classes: dict[str, ClassSource]
    functions: dict[str, ast.FunctionDef]

    def ending(self, *suffixes: str) -> list[ClassSource]:
        """The classes whose name ends with one of `suffixes`, nearest to the root first."""
        return [found for name, found in self.classes.items() if name.endswith(suffixes)]

    def method(self, class_name: str, name: str) -> ast.FunctionDef | None:
        """The method `name` of a class or of its nearest base within the file."""
        found = self.classes.get(class_name)
        while found is not None:
            if name in found.methods:
                return found.methods[name]
            found = next((self.classes[base] for base in found.bases if base in self.classes), None)
        return None


def modeling_path(config: Any) -> Path | None:
    """The modelling file that belongs to a config object, or None (a config class of its own, or no such file)."""
    module = type(config).__module__
    if ".configuration_" not in module:
        return None
    configuration = sys.modules.get(module)
    origin = getattr(configuration, "__file__", None)
    if origin is None:
        specification = importlib.util.find_spec(module)
        origin = specification.origin if specification else None
    if origin is None:
        return None
    path = Path(origin).with_name(Path(origin).name.replace("configuration_", "modeling_", 1))
    return path if path.is_file() else None


def root_class(config: Any) -> str | None:
    """Name of the Hugging Face class that generates text from this config, or its backbone where there is none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type) or MODEL_MAPPING_NAMES.get(config.model_type)
    return name if isinstance(name, str) else (name[0] if name else None)


def modeling_source(config: Any) -> ModelingSource | None:
    """Parse the modelling file of a config, keeping what its language model is built from.

    Args:
        config: a `PretrainedConfig` of a language model (a nested `text_config`, not its wrapper).

    Returns:
        The source, or None where transformers has no modelling file for the config.
    """
    path = modeling_path(config)
    root = root_class(config) if path else None
    if path is None or root is None:
        return None
    classes = parse_classes(path)
    if root not in classes:
        return None
    reached: dict[str, ClassSource] = {}
    queue = [root]
    while queue:
        name = queue.pop(0)
        if name not in reached:
            reached[name] = classes[name]
            queue.extend(other for other in classes[name].uses if not other.endswith("PreTrainedModel"))
    return ModelingSource(path=path, root=root, classes=reached, functions=_called(path, reached))


def _called(path: Path, classes: dict[str, ClassSource]) -> dict[str, ast.FunctionDef]:
    functions = parse_functions(path)
    reached: dict[str, ast.FunctionDef] = {}
    queue = [name for found in classes.values() for name in _names(found.node) if name in functions]
    while queue:
        name = queue.pop(0)
        if name not in reached:
            reached[name] = functions[name]
            queue.extend(other for other in _names(functions[name]) if other in functions)
    return reached


@functools.lru_cache(maxsize=32)
def parse_functions(path: Path) -> dict[str, ast.FunctionDef]:
    """Every function defined at the top level of a Python file."""
    return {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


@functools.lru_cache(maxsize=32)
def parse_classes(path: Path) -> dict[str, ClassSource]:
    """Every class defined at the top level of a Python file."""
    tree = ast.parse(path.read_text())
    nodes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    return {name: _class_source(node, nodes) for name, node in nodes.items()}


def _class_source(node: ast.ClassDef, siblings: dict[str, ast.ClassDef]) -> ClassSource:
    # _can_record_outputs and type annotations name classes that the model is not built from.
    body: list[ast.AST] = [
        *node.bases,
        *(part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"),
    ]
    names = [inner for part in body for inner in _names(part) if inner in siblings and inner != node.name]
    return ClassSource(
        name=node.name,
        bases=tuple(ast.unparse(base).rpartition(".")[2] for base in node.bases),
        methods={part.name: part for part in node.body if isinstance(part, ast.FunctionDef)},
        uses=tuple(dict.fromkeys(names)),
        node=node,
    )


def _names(part: ast.AST) -> list[str]:
    if isinstance(part, ast.FunctionDef):
        return [node.id for stmt in part.body for node in ast.walk(stmt) if isinstance(node, ast.Name)]
    return [node.id for node in ast.walk(part) if isinstance(node, ast.Name)]


def assignments(function: ast.FunctionDef | None, attribute: str) -> list[ast.expr]:
    """Values that a method assigns to `self.<attribute>` or to a local of that name, in order."""
    if function is None:
        return []
    values = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                is_self = (
                    isinstance(target, ast.Attribute)
                    and target.attr == attribute
                    and isinstance(target.value, ast.Name)
                    and target.value.id == "self"
                )
                if is_self or (isinstance(target, ast.Name) and target.id == attribute):
                    values.append(node.value)
    return values
