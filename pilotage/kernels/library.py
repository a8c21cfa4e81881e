"""Kernels in a library's source, read without importing it: names, arguments, docstrings, and the limits it asserts."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pilotage.core.errors import BadInput

INSTALLED = ("nkilib", "nki_samples", "neuronxcc")  # libraries that are looked for among the installed packages
_ASSERTS = ("kernel_assert", "assert_shape")
_KNOWN = {"pmax": 128, "psum_fmax": 512, "gemm_stationary_fmax": 128, "gemm_moving_fmax": 512}  # nl.tile_size.*
_NUMBER = re.compile(r"^\s*(?P<name>\w+)\b.*\((?P<values>\d+(?: or \d+)+)\)")
_COMPARISONS = {ast.LtE: "<=", ast.Lt: "<", ast.GtE: ">=", ast.Gt: ">", ast.Eq: "=="}


@dataclass(frozen=True, kw_only=True)
class Bound:
    """One limit of a kernel: `name` compared with numbers.

    Attributes:
        relation: "<=", "<", ">=", ">", "==", "in" or "%" (divisible by).
        line: where it stands in the file.
    """

    name: str
    relation: str
    values: tuple[int, ...]
    line: int

    def allows(self, value: int) -> bool:
        """Tell whether a value is within the limit."""
        first = self.values[0]
        match self.relation:
            case "<=":
                return value <= first
            case "<":
                return value < first
            case ">=":
                return value >= first
            case ">":
                return value > first
            case "%":
                return value % first == 0
        return value in self.values

    def __str__(self) -> str:
        if self.relation == "%":
            return f"{self.name} divisible by {self.values[0]}"
        return f"{self.name} {self.relation} {' or '.join(map(str, self.values))}"


@dataclass(frozen=True, kw_only=True)
class LibraryKernel:
    """A kernel that was found.

    Attributes:
        module: dotted, as it is imported.
        language: NKI or Triton.
        decorated: whether it already is a kernel, or a function that has to be made one.
        parameters: names, those without a default first named in `required`.
        text: docstrings of the function and its module.
        fallback: a plain-torch function of the same library for it, "module:function", or None.
    """

    name: str
    module: str
    file: Path
    line: int
    language: str
    decorated: bool
    parameters: tuple[str, ...]
    required: tuple[str, ...]
    text: str
    bounds: tuple[Bound, ...]
    fallback: str | None


def installed() -> list[Path]:
    """Return the folders of known kernel libraries that are installed."""
    found = []
    for name in INSTALLED:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations and spec.origin is not None:
            found += [Path(folder) for folder in spec.submodule_search_locations]
    return found


def scan(roots: Sequence[Path]) -> list[LibraryKernel]:
    """Read every kernel under some folders or files.

    Raises:
        BadInput: a path that is not there.
    """
    out = []
    for root in roots:
        if not root.exists():
            raise BadInput("no such file or folder", where=str(root), do="name the folder of a kernel library")
        files = [root] if root.is_file() else sorted(root.rglob("*.py"))
        for file in files:
            relative = file.relative_to(root) if root.is_dir() else Path(file.name)
            if any(part in ("test", "tests") or part.startswith("test_") for part in relative.parts):
                continue
            out += list(_kernels(file))
    return out


def _kernels(file: Path) -> Iterator[LibraryKernel]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, OSError):
        return  # templates and other versions of Python are no kernels to us
    language = _language(tree)
    if language is None or file.stem.endswith("_torch"):
        return
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    constants = _constants(tree)
    about = ast.get_docstring(tree) or ""
    for function in functions.values():
        decorated = any(_is_jit(item) for item in function.decorator_list)
        if function.name.startswith("_") or not (decorated or function.name == file.stem):
            continue
        arguments = function.args
        names = [item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        optional = [item.arg for item in arguments.args[len(arguments.args) - len(arguments.defaults) :]]
        optional += [
            item.arg
            for item, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            if default is not None
        ]
        own = ast.get_docstring(function) or ""
        bounds = [bound for used in _reached(function, functions) for bound in _bounds(used, constants)]
        yield LibraryKernel(
            name=function.name,
            module=_module(file),
            file=file,
            line=function.lineno,
            language=language,
            decorated=decorated,
            parameters=tuple(names),
            required=tuple(name for name in names if name not in optional),
            text=f"{own}\n{about}",
            bounds=tuple(dict.fromkeys((*bounds, *_documented(own, function.lineno)))),
            fallback=_fallback(file, function.name),
        )


def _language(tree: ast.Module) -> str | None:
    for node in ast.walk(tree):
        names = [item.name for item in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        for name in names:
            if name.split(".")[0] == "nki" or name.startswith("neuronxcc.nki") or name == "neuronxcc":
                return "NKI"
            if name.split(".")[0] == "triton":
                return "Triton"
    return None


def _is_jit(node: ast.expr) -> bool:
    node = node.func if isinstance(node, ast.Call) else node
    name = ast.unparse(node)
    return name.split(".")[-1] in ("jit", "nki_jit", "trace") or name.startswith("nki.")


def _module(file: Path) -> str:
    parts = [file.stem] if file.stem != "__init__" else []
    folder = file.parent
    while (folder / "__init__.py").exists():
        parts.insert(0, folder.name)
        folder = folder.parent
    for name in INSTALLED:
        if name in parts:
            parts = parts[parts.index(name) :]
    return ".".join(parts)


def _fallback(file: Path, kernel: str) -> str | None:
    beside = file.with_name(f"{file.stem}_torch.py")
    if not beside.exists():
        return None
    try:
        tree = ast.parse(beside.read_text(encoding="utf-8"))
    except SyntaxError:
        return None
    public = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    named = [name for name in public if kernel.lower() in name.lower()] or public
    return f"{_module(beside)}:{named[0]}" if named else None


def _constants(tree: ast.Module) -> dict[str, int]:
    out: dict[str, int] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            value = _number(node.value, out)
            if value is not None:
                out[node.targets[0].id] = value
    return out


def _number(node: ast.expr, constants: dict[str, int]) -> int | None:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    if isinstance(node, ast.Attribute):
        return _KNOWN.get(node.attr)
    if isinstance(node, ast.BinOp):
        left, right = _number(node.left, constants), _number(node.right, constants)
        if left is not None and right is not None:
            match node.op:
                case ast.Mult():
                    return left * right
                case ast.Add():
                    return left + right
                case ast.Sub():
                    return left - right
    return None


def _reached(function: ast.FunctionDef, functions: dict[str, ast.FunctionDef]) -> list[ast.FunctionDef]:
    """Return a function and those of the same file that it calls, at any depth."""
    out, open_ = [function], [function]
    while open_:
        for node in ast.walk(open_.pop()):
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
            if called in functions and functions[called] not in out:
                out.append(functions[called])
                open_.append(functions[called])
    return out


def _bounds(function: ast.FunctionDef, constants: dict[str, int]) -> Iterator[Bound]:
    for node in ast.walk(function):
        condition: ast.expr | None = None
        if isinstance(node, ast.Assert):
            condition = node.test
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in _ASSERTS and node.args:
            condition = node.args[0]
        if condition is not None:
            parts = condition.values if isinstance(condition, ast.BoolOp) and _all(condition) else [condition]
            for part in parts:
                yield from _bound(part, constants)


def _all(condition: ast.BoolOp) -> bool:
    return isinstance(condition.op, ast.And)


def _bound(node: ast.expr, constants: dict[str, int]) -> Iterator[Bound]:
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        return
    left, operation, right = node.left, node.ops[0], node.comparators[0]
    if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod) and isinstance(operation, ast.Eq):
        divisor = _number(left.right, constants)
        if divisor and _number(right, constants) == 0 and (name := _name(left.left)):
            yield Bound(name=name, relation="%", values=(divisor,), line=node.lineno)
        return
    name = _name(left)
    if name is None:
        return
    if isinstance(operation, ast.In) and isinstance(right, (ast.Tuple, ast.List, ast.Set)):
        values = [_number(item, constants) for item in right.elts]
        if values and all(value is not None for value in values):
            yield Bound(name=name, relation="in", values=tuple(v for v in values if v is not None), line=node.lineno)
        return
    relation, value = _COMPARISONS.get(type(operation)), _number(right, constants)
    if relation is not None and value is not None and name not in constants:
        yield Bound(name=name, relation=relation, values=(value,), line=node.lineno)


def _name(node: ast.expr) -> str | None:
    """Return the last name of `x`, `dims.x`: what a limit is about."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def _documented(text: str, line: int) -> Iterator[Bound]:
    """Read "d_head: head dimension (64 or 128)"."""
    for row in text.splitlines():
        if (match := _NUMBER.match(row)) is not None and ":" in row:
            values = tuple(int(value) for value in match["values"].split(" or "))
            yield Bound(name=match["name"], relation="in", values=values, line=line)
