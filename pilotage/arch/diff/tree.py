"""The module tree of a model, built without memory, with repeated layers folded, and the difference of two of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pilotage.arch.spec import ArchSpec


@dataclass(frozen=True, kw_only=True)
class Node:
    """A module, or a run of equal ones.

    Attributes:
        name: its name in its parent; "0-17" or "0,2,4" for folded children of a list.
        kind: its class without the model's own prefix: "Attention", "Linear".
        shapes: own parameters (and persistent buffers) by name.
        children: submodules in order; folded in lists.
        count: how many equal modules this stands for.
    """

    name: str
    kind: str
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    children: tuple[Node, ...] = ()
    count: int = 1

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for modules that are built alike, whatever their name."""
        return (
            self.kind,
            tuple(self.shapes.items()),
            tuple((child.name, child.signature) for child in self.children),
        )

    def child(self, *names: str) -> Node | None:
        """The first child with one of these names."""
        return next((child for child in self.children if child.name in names), None)

    def walk(self, path: str = "") -> Iterator[tuple[str, Node]]:
        """This node and everything below it, with paths relative to it."""
        yield path, self
        for child in self.children:
            yield from child.walk(f"{path}.{child.name}" if path else child.name)

    def text(self) -> str:
        """Its class and own shapes, e.g. "Linear [2048, 640] + bias"."""
        weight = self.shapes.get("weight")
        words = [self.kind]
        if weight is not None:
            words.append(str(list(weight)))
        words.extend(f"{name} {list(shape)}" for name, shape in self.shapes.items() if name not in ("weight", "bias"))
        if "bias" in self.shapes:
            words.append("+ bias")
        return " ".join(words)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "count": self.count,
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "children": [child.to_json() for child in self.children],
        }


@dataclass(frozen=True, kw_only=True)
class TreeRow:
    """One line of the difference of two trees.

    Attributes:
        path: place in the tree; "layers.0-31 | layers.0-17" where the folded names differ.
        verdict: "same", "differs", "only_a" or "only_b".
        a, b: what stands there on each side, or None.
    """

    path: str
    verdict: str
    a: str | None
    b: str | None

    def to_json(self) -> dict[str, Any]:
        return {"path": self.path, "verdict": self.verdict, "a": self.a, "b": self.b}


def tree_of(module: Any, name: str, prefix: str) -> Node:
    """Describe a module and everything below it, equal members of a list folded.

    Args:
        module: a `torch.nn.Module`, usually on the meta device.
        name: its name.
        prefix: the model's own prefix on class names, e.g. "Gemma3".
    """
    kind = type(module).__name__
    for start in (prefix + "Text", prefix):
        if start and kind.startswith(start) and kind != start:
            kind = kind.removeprefix(start)
            break
    shapes = {key: tuple(parameter.shape) for key, parameter in module.named_parameters(recurse=False)}
    persistent = set(module.state_dict(keep_vars=True)) if not list(module.children()) else set()
    shapes |= {key: tuple(b.shape) for key, b in module.named_buffers(recurse=False) if key in persistent}
    children = [tree_of(child, key, prefix) for key, child in module.named_children()]
    if kind in ("ModuleList", "Sequential"):
        children = _folded(children)
    return Node(name=name, kind=kind, shapes=shapes, children=tuple(children))


def _folded(children: list[Node]) -> list[Node]:
    groups: dict[tuple[Any, ...], list[Node]] = {}
    for child in children:
        groups.setdefault(child.signature, []).append(child)
    return [
        replace(members[0], name=ranges([int(m.name) for m in members]), count=len(members))
        if all(member.name.isdigit() for member in members)
        else members[0]
        for members in groups.values()
    ]


def ranges(numbers: list[int]) -> str:
    """Ascending numbers, runs of neighbours joined: [0, 1, 2, 5] is "0-2,5"; many runs are "0-4,6-10,...,24-28"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ",".join(words if len(words) <= 4 else [*words[:2], "...", words[-1]])


def layer_list(tree: Node, num_layers: int) -> tuple[str, Node] | None:
    """Path and node of the list that holds the decoder layers."""
    for path, node in tree.walk():
        if node.kind == "ModuleList" and sum(child.count for child in node.children) == num_layers:
            return path, node
    return None


class Dimensions:
    """Names for the sizes of one model, so that shapes of two models compare by meaning, not by number."""

    def __init__(self, spec: ArchSpec) -> None:
        heads, kv_heads = spec.num_heads or 0, spec.num_kv_heads or 0
        sizes = {spec.head_size or 0}
        sizes |= {layer["head_dim"] for layer in spec.per_layer_config.values() if "head_dim" in layer}
        widths = spec.intermediate_size  # a list where layers differ (Gemma 3n)
        widths = [int(width) for width in widths] if isinstance(widths, list | tuple) else [widths or 0]
        expert = spec.moe_intermediate_size or widths[0]
        named: list[tuple[str, int]] = [
            ("D", spec.hidden_size),
            *((name, times * width) for width in widths for name, times in (("F", 1), ("2F", 2))),
            ("V", spec.vocab_size),
            ("E", spec.num_experts or 0),
            ("Fe", expert),
            ("2Fe", 2 * expert),
            ("N", heads),
            *((name, value) for size in sizes for name, value in (("H", size), ("NH", heads * size))),
            *(("KH", kv_heads * size) for size in sizes),
        ]
        self._names: dict[int, set[str]] = {}
        for name, value in named:
            if value:
                self._names.setdefault(value, set()).add(name)

    def names(self, size: int) -> set[str]:
        """Every name that a size may stand for."""
        return self._names.get(size, set())


def alike(a: Node, b: Node, dims_a: Dimensions, dims_b: Dimensions) -> bool:
    """Same class and same parameters, of shapes that mean the same in both models."""
    if a.kind != b.kind or a.shapes.keys() != b.shapes.keys():
        return False
    for name, shape in a.shapes.items():
        other = b.shapes[name]
        if len(shape) != len(other):
            return False
        for size, other_size in zip(shape, other, strict=True):
            if size != other_size and not dims_a.names(size) & dims_b.names(other_size):
                return False
    return True


def tree_diff(a: Node, b: Node, dims_a: Dimensions, dims_b: Dimensions) -> list[TreeRow]:
    """Compare two trees place by place; a module that only one side has is one row, however much is below it."""
    rows: list[TreeRow] = []
    _compare(a, b, "", dims_a, dims_b, rows)
    return rows


def _compare(a: Node, b: Node, path: str, dims_a: Dimensions, dims_b: Dimensions, rows: list[TreeRow]) -> None:
    if path:
        verdict = "same" if alike(a, b, dims_a, dims_b) else "differs"
        rows.append(TreeRow(path=path, verdict=verdict, a=a.text(), b=b.text()))
    for child_a, child_b in _pairs(a, b):
        name_a, name_b = (child.name if child else None for child in (child_a, child_b))
        names = [name for name in dict.fromkeys((name_a, name_b)) if name is not None]
        below = " | ".join(f"{path}.{name}" if path else name for name in names)
        if child_a is not None and child_b is not None:
            _compare(child_a, child_b, below, dims_a, dims_b, rows)
        else:
            only, side = (child_a, "only_a") if child_a is not None else (child_b, "only_b")
            assert only is not None
            rows.append(
                TreeRow(
                    path=below,
                    verdict=side,
                    a=_whole(only) if side == "only_a" else None,
                    b=_whole(only) if side == "only_b" else None,
                )
            )


def _pairs(a: Node, b: Node) -> list[tuple[Node | None, Node | None]]:
    """Children that correspond: by name, and in lists each group of B to the nearest group of A."""
    if a.kind == b.kind == "ModuleList":
        pairs: list[tuple[Node | None, Node | None]] = []
        used = set()
        for node in b.children:
            if not a.children:
                pairs.append((None, node))
                continue
            nearest = max(range(len(a.children)), key=lambda i: _likeness(a.children[i], node))
            used.add(nearest)
            pairs.append((a.children[nearest], node))
        return pairs + [(node, None) for i, node in enumerate(a.children) if i not in used]
    names = [child.name for child in b.children]
    in_order = [child.name for child in a.children if child.name not in names]
    # B's order, with what only A has at the place where A has it.
    order = list(names)
    for name in in_order:
        before = [child.name for child in a.children]
        previous = next((n for n in reversed(before[: before.index(name)]) if n in order), None)
        order.insert(order.index(previous) + 1 if previous else 0, name)
    return [(a.child(name), b.child(name)) for name in order]


def _likeness(a: Node, b: Node) -> float:
    paths_a, paths_b = ({(path, node.kind) for path, node in side.walk()} for side in (a, b))
    return len(paths_a & paths_b) / len(paths_a | paths_b)


def _whole(node: Node) -> str:
    below = [inner for _, inner in node.walk()][1:]
    if not below:
        return node.text()
    return f"{node.text()} ({', '.join(f'{child.name}: {child.text()}' for child in node.children)})"


def lines(node: Node, indent: str = "  ", depth: int = 0) -> list[str]:
    """The folded tree as indented text."""
    times = f" x {node.count}" if node.count > 1 else ""
    found = [f"{indent * depth}{node.name}: {node.text()}{times}"] if node.name else []
    for child in node.children:
        found.extend(lines(child, indent, depth + 1 if node.name else depth))
    return found
