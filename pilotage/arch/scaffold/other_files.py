"""The small files of a new package: config, weights, factory, exports."""

from __future__ import annotations

import ast
import re
import textwrap
from typing import Any

from pilotage.arch.diff.work import WorkItem
from pilotage.arch.scaffold.code import WIDTH, Imports, call, mark
from pilotage.arch.scaffold.donor import Donor, Module
from pilotage.arch.scaffold.names import Names
from pilotage.arch.spec import ArchSpec

# Fields that a config of its own would hold; flags and what other parts read are not among them.
_TYPES = {
    "attn_softcap": "float",
    "embedding_scale": "float",
    "residual_multiplier": "float",
    "logit_multiplier": "float",
    "attention_chunk_size": "int",
    "num_experts": "int",
    "num_experts_per_token": "int",
    "moe_intermediate_size": "int",
    "num_shared_experts": "int",
    "norm_topk_prob": "bool",
    "routed_scaling": "float",
    "mlp_layer_types": "tuple[str, ...]",
    "nope_layers": "tuple[int, ...]",
    "kv_lora_rank": "int",
    "q_lora_rank": "int",
    "qk_nope_head_dim": "int",
    "qk_rope_head_dim": "int",
    "v_head_dim": "int",
    "num_kv_shared_layers": "int",
    "per_layer_input_size": "int",
    "per_layer_config": "dict[int, dict[str, int]]",
}


def marks_in(items: list[WorkItem], file: str) -> list[WorkItem]:
    """The items that touch a file."""
    return [item for item in items if any(place == file for place, _ in item.places)]


def config_file(donor: Donor, names: Names, items: list[WorkItem], spec: ArchSpec) -> str:
    """Write config.py: the donor's, reading what the work items need, marked where they touch it."""
    module = donor.files["config.py"]
    owner = module.classes()[donor.config_class]
    function = next(m for m in owner.body if isinstance(m, ast.FunctionDef) and m.name == "from_configs")
    reads = dict.fromkeys(name for item in items for name in item.reads)
    own = _own_fields(donor, list(reads), spec)
    carried = donor.config_fields()
    body = "".join(mark(item, " " * 8, carried) for item in marks_in(items, "config.py"))
    body += _body(module, function, [name for name in reads if name in donor.refusable()], spec, own)
    start = function.body[1] if len(function.body) > 1 else function.body[0]
    lines = module.text.splitlines(keepends=True)
    text = "".join(lines[: start.lineno - 1]) + body + "".join(lines[function.end_lineno or len(lines) :])
    if own:
        text = text.replace("; nothing beyond the common fields.", ".")
        first = owner.body[0]
        docstring = first.end_lineno or first.lineno
        lines = text.splitlines(keepends=True)
        fields = "".join(f"    {name}: {kind}\n" for name, kind in own.items())
        after = lines[docstring:]
        blank = "" if after and not after[0].strip() else "\n"
        already = bool(re.match(r"    \w+: ", "".join(after).lstrip("\n")))
        text = (
            "".join(lines[:docstring])
            + "\n"
            + fields
            + ("" if already else blank)
            + "".join(after[1:] if already else after)
        )
    return names.rename(_finish(text, names, marked=bool(marks_in(items, "config.py"))))


def _own_fields(donor: Donor, reads: list[str], spec: ArchSpec) -> dict[str, str]:
    if not any("from_spec" in module.text for module in donor.common):
        return {}
    known = donor.config_fields()
    return {name: _TYPES[name] for name in reads if name in _TYPES and name not in known and _there(spec, name)}


def _there(spec: ArchSpec, name: str) -> bool:
    return getattr(spec, name) is not None


def _body(module: Module, function: ast.FunctionDef, reads: list[str], spec: ArchSpec, own: dict[str, str]) -> str:
    """The donor's statements after the docstring, with the read widened and the new fields passed on."""
    statements = [s for s in function.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    text = textwrap.dedent("".join(module.source(statement) for statement in statements))
    found = next(
        (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and ast.unparse(n.func) == "read"), None
    )
    if found is None:
        return textwrap.indent(text, " " * 8)
    written = ast.get_source_segment(text, found) or ""
    if not re.search(r"^spec = read\(", text, re.MULTILINE):
        text = _read(found, module, reads, spec) + text.replace(written, "spec")
    else:
        text = text.replace(f"spec = {written}\n", _read(found, module, reads, spec))
    if own:
        text = re.sub(r"from_spec\((.*?)\)(?=\n|$)", lambda m: _with_own(m[1], own), text, flags=re.DOTALL)
    return _broken(textwrap.indent(text, " " * 8))


def _read(found: ast.Call, module: Module, reads: list[str], spec: ArchSpec) -> str:
    keywords = {keyword.arg: keyword.value for keyword in found.keywords}
    arguments = [ast.unparse(argument).replace("'", '"') for argument in found.args]
    if value := _widened(keywords.get("beyond"), module, reads):
        arguments.append(f"beyond={value}")
    kinds = _widened(keywords.get("layer_types"), module, list(dict.fromkeys(spec.layer_types)))
    if kinds and kinds != '("full_attention",)':
        arguments.append(f"layer_types={kinds}")
    return call("spec = read(", arguments, "")


def _widened(value: ast.expr | None, module: Module, extra: list[str]) -> str:
    """A tuple of strings, or a name of one, with further strings in it."""
    if isinstance(value, ast.Name):
        known = [
            node.value
            for node in module.tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == value.id
        ]
        held = ast.literal_eval(known[0]) if known else ()
        more = [name for name in extra if name not in held]
        return f"(*{value.id}, {', '.join(_quoted(more))})" if more else value.id
    held = list(ast.literal_eval(value)) if value is not None else []
    names = list(dict.fromkeys([*held, *extra]))
    return f"({', '.join(_quoted(names))}{',' if len(names) == 1 else ''})" if names else ""


def _quoted(names: list[str]) -> list[str]:
    return [f'"{name}"' for name in names]


def _with_own(arguments: str, own: dict[str, str]) -> str:
    more = [f"{name}=spec.{name}" for name in own if f"{name}=" not in arguments]
    return f"from_spec({', '.join([arguments.strip().rstrip(','), *more])})"


def _broken(text: str) -> str:
    """Break lines that are too long at their outermost tuple or call, as the formatter does."""
    lines = []
    for line in text.splitlines():
        if len(line) <= WIDTH:
            lines.append(line)
            continue
        indent = line[: len(line) - len(line.lstrip())]
        opened = line.index("(") + 1
        closed = line.rindex(")")
        parts = _split_arguments(line[opened:closed])
        lines.append(line[:opened])
        lines.extend(_broken(f"{indent}    {part}").rstrip("\n") + "," for part in parts)
        lines.append(f"{indent}{line[closed:].rstrip(',')}" + ("," if line.endswith(",") else ""))
    return "\n".join(lines) + "\n"


def _split_arguments(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += letter in "([{"
        depth -= letter in ")]}"
        if letter == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def weights_file(donor: Donor, names: Names, items: list[WorkItem]) -> str:
    """Write weights.py: the donor's, marked where the work items touch it."""
    module = donor.files["weights.py"]
    found = marks_in(items, "weights.py")
    function = next(n for n in module.tree.body if isinstance(n, ast.FunctionDef) and n.name == "weight_map")
    first = function.body[1] if len(function.body) > 1 else function.body[0]
    lines = module.text.splitlines(keepends=True)
    lines.insert(first.lineno - 1, "".join(mark(item, "    ", donor.config_fields()) for item in found))
    return names.rename(_finish("".join(lines), names, marked=bool(found)))


def plain_file(donor: Donor, names: Names, file: str) -> str:
    """A file of the donor under the new names."""
    return names.rename(_finish(donor.files[file].text, names, marked=False))


def training_file(donor: Donor, names: Names, model_type: str | None) -> str:
    """hf.py: the donor's under the new names, with transformers' config class of the model."""
    from transformers import CONFIG_MAPPING

    text = donor.files["hf.py"].text
    donors = re.search(r"^from transformers import (\w+Config)$", text, re.MULTILINE)
    renamed = plain_file(donor, names, "hf.py")
    if donors is None or model_type not in CONFIG_MAPPING:
        return _wrapped(renamed)
    # Where the donor's class was renamed, it is found under its new name.
    known = names.rename(donors[1])
    return _wrapped(re.sub(rf"\b{known}\b", CONFIG_MAPPING[str(model_type)].__name__, renamed))


def _wrapped(text: str) -> str:
    """Break the heads of classes that longer names have made too long, as ruff does."""

    def broken(head: re.Match[str]) -> str:
        return head[0] if len(head[0]) <= WIDTH else f"class {head[1]}(\n    {head[2]}\n):"

    return re.sub(r"^class (\w+)\((.*)\):$", broken, text, flags=re.MULTILINE)


def _finish(text: str, names: Names, *, marked: bool) -> str:
    """Sort the imports under the new names, with `port` among them where it is called."""
    tree = ast.parse(text)
    imports = Imports(tree, own=("pilotage", names.package.partition(".")[0]))
    if marked:
        imports.add("pilotage.arch.port", "port")
    body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    if not body:
        return text
    lines = text.splitlines(keepends=True)
    block = names.renamed_imports(imports)
    return "".join(lines[: body[0].lineno - 1]) + block + "".join(lines[body[-1].end_lineno or 0 :])


def exports(names: Names, title: str) -> str:
    """`__init__.py`."""
    imports = Imports(ast.parse(""), own=("pilotage", names.package.partition(".")[0]))
    imports.add(f"{names.package}.config", names.config_class)
    imports.add(f"{names.package}.model", names.architecture)
    listed = ", ".join(f'"{name}"' for name in sorted([names.config_class, names.architecture]))
    return f'"""{title}."""\n\n{imports.text()}\n__all__ = [{listed}]\n'


def table(rows: list[tuple[Any, ...]]) -> str:
    """A Markdown table body."""
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)
