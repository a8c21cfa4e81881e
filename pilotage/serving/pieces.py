"""Compiling a captured graph layer by layer, each distinct layer once.

A decoder is a few kinds of layers repeated many times. Compiling the whole graph makes the compiler lower and generate
code for every repetition, which is most of a cold start. Here the graph is cut where one layer of a module list ends
and the next begins; pieces that are equal node by node (operators, constants, shapes, strides) share one compiled
piece. What is lost is fusion across the cut, one pass over [T, D] a layer.
"""

from __future__ import annotations

import hashlib
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable, SerializableCallable

_LAYER = re.compile(r"^(.*?\.\d+)(\.|$)")  # "L['self'].model.layers.3.mlp" -> "L['self'].model.layers.3"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call of a piece.

    Attributes:
        piece: which one. inputs: registers of its arguments. outputs: registers of its results.
        dead: registers that nothing reads afterwards.
    """

    piece: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dead: tuple[int, ...]


class Stitched(SerializableCallable):
    """Compiled pieces, called one after another on numbered registers; the graph's arguments are the first ones."""

    def __init__(
        self, pieces: Sequence[Any], steps: Sequence[Step], outputs: Sequence[int], num_registers: int
    ) -> None:
        self.pieces, self.steps, self.outputs, self.num_registers = pieces, tuple(steps), tuple(outputs), num_registers
        self._calls: list[tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = [
            (pieces[step.piece].compiled_fn, step.inputs, step.outputs, step.dead) for step in steps
        ]

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        registers: list[Any] = [*arguments, *[None] * (self.num_registers - len(arguments))]
        for call, inputs, outputs, dead in self._calls:
            results = call(*[registers[index] for index in inputs])
            for index, result in zip(outputs, results, strict=True):
                registers[index] = result
            for index in dead:
                registers[index] = None
        return tuple([registers[index] for index in self.outputs])

    @classmethod
    def serialize_compile_artifacts(cls, fn: Stitched) -> bytes:
        stored = [BundledAOTAutogradSerializableCallable.serialize_compile_artifacts(piece) for piece in fn.pieces]
        return pickle.dumps((stored, fn.steps, fn.outputs, fn.num_registers))

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> Stitched:
        # Only ever called on what compile_cache has checked against its own checksum.
        stored, steps, outputs, num_registers = pickle.loads(data)  # noqa: S301
        pieces = [BundledAOTAutogradSerializableCallable.deserialize_compile_artifacts(piece) for piece in stored]
        return cls(pieces, steps, outputs, num_registers)


def compile_in_pieces(graph: fx.GraphModule, options: dict[str, Any]) -> Stitched:
    """Cut `graph`, as dynamo captured it, into layers and compile each distinct one.

    Args:
        graph: flat inputs and outputs, tensors only.
        options: inductor settings.
    """
    registers = {node: index for index, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    position: dict[str, int] = {}
    pieces: list[Any] = []
    calls: list[tuple[int, list[fx.Node], list[fx.Node]]] = []
    for nodes in cut(graph.graph):
        inputs, outputs = _boundary(nodes)
        key = structure(nodes, inputs, outputs)
        if key not in position:
            position[key] = len(pieces)
            pieces.append(_compile(_extract(graph, nodes, inputs, outputs), inputs, options))
        calls.append((position[key], inputs, outputs))
        for node in outputs:
            registers[node] = len(registers)
    (results,) = graph.graph.output_node().args
    final = [registers[node] for node in results]
    return Stitched(pieces, _steps(calls, registers, set(final)), final, len(registers))


def _steps(
    calls: Sequence[tuple[int, list[fx.Node], list[fx.Node]]], registers: dict[fx.Node, int], final: set[int]
) -> list[Step]:
    last = {registers[node]: index for index, (_, inputs, _) in enumerate(calls) for node in inputs}
    return [
        Step(
            piece=piece,
            inputs=tuple(registers[node] for node in inputs),
            outputs=tuple(registers[node] for node in outputs),
            dead=tuple(number for number, when in last.items() if when == index and number not in final),
        )
        for index, (piece, inputs, outputs) in enumerate(calls)
    ]


def cut(graph: fx.Graph) -> list[list[fx.Node]]:
    """Group the nodes of a graph, in order, by the layer whose code they come from.

    Everything before, between and after the layers of a module list is a group of its own. If a cut would have to pass
    anything but a tensor, there is no cut: the graph is one group.
    """
    groups: list[tuple[str | None, list[fx.Node]]] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        layer = _layer(node)
        known = bool(node.meta.get("nn_module_stack"))  # a node from nowhere stays with its neighbours
        if not groups or (known and groups[-1][0] != layer):
            groups.append((layer, []))
        groups[-1][1].append(node)
    whole = [node for _, nodes in groups for node in nodes]
    found = [nodes for _, nodes in groups]
    crossing = [node for nodes in found for node in (*_boundary(nodes)[0], *_boundary(nodes)[1])]
    if not all(isinstance(node.meta.get("example_value"), torch.Tensor) for node in crossing):
        return [whole]
    return found


def _layer(node: fx.Node) -> str | None:
    for path, *_ in (node.meta.get("nn_module_stack") or {}).values():
        if match := _LAYER.match(path):
            return match[1]
    return None


def _boundary(nodes: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return what a group takes in, in order of first use, and what others take from it."""
    inside = set(nodes)
    inputs = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    return list(inputs), outputs


def structure(nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> str:
    """Hash what a group computes: two groups with the same hash can share compiled code."""
    number = {node: index for index, node in enumerate((*inputs, *nodes))}

    def constant(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return ("node", number[value])
        if isinstance(value, slice):
            return ("slice", constant(value.start), constant(value.stop), constant(value.step))
        if isinstance(value, list | tuple):
            return (type(value).__name__, *(constant(item) for item in value))
        if isinstance(value, dict):
            return ("dict", *((key, constant(item)) for key, item in value.items()))
        return (type(value).__name__, repr(value))

    described: list[Any] = []
    for node in inputs:
        tensor = node.meta["example_value"]
        described.append((str(tensor.dtype), str(tensor.device), tuple(tensor.shape), tuple(tensor.stride())))
        described.append((tensor.storage_offset(), tensor.requires_grad))
    for node in nodes:
        if node.op in ("get_attr", "call_module"):  # state of its own: shared with nobody
            described.append((node.op, str(node.target), id(node)))
            continue
        target = node.target if isinstance(node.target, str) else _qualified(node.target)
        described.append((node.op, target, constant(node.args), constant(node.kwargs)))
    described.append([number[node] for node in outputs])
    return hashlib.sha256(repr(described).encode()).hexdigest()


def _qualified(target: Any) -> str:
    # Two functions of one name in one module would be told apart by their identity.
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}#{id(target)}"


def _extract(
    graph: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.GraphModule:
    piece = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = piece.placeholder(node.name)
        copies[node].meta = {"example_value": node.meta["example_value"]}
    for node in nodes:
        copies[node] = piece.node_copy(node, lambda source: copies[source])
    piece.output(tuple(copies[node] for node in outputs))
    return fx.GraphModule(graph, piece)


def _compile(piece: fx.GraphModule, inputs: Sequence[fx.Node], options: dict[str, Any]) -> Any:
    from torch._inductor.standalone_compile import standalone_compile

    examples = [node.meta["example_value"] for node in inputs]
    artifact = standalone_compile(
        piece,
        examples,
        dynamic_shapes="from_example_inputs",
        options={"config_patches": options},
        aot=True,
        donate_graph_module=True,
        fake_mode=examples[0].fake_mode,
    )
    return artifact.inner_fn
