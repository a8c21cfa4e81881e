"""Which methods of the transformers classes differ, beyond names and comments."""

from __future__ import annotations

import ast
import copy
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pilotage.arch.modeling import ClassSource, ModelingSource

# A class's role is the end of its name; the first that fits.
_ROLES: tuple[tuple[str, str], ...] = (
    ("ForCausalLM", r"(ForCausalLM|LMHeadModel|ForConditionalGeneration)$"),
    ("RotaryEmbedding", r"(RotaryEmbedding|RotaryPositionalEmbedding)$"),
    ("Embedding", r"Embeddings?$"),
    ("Experts", r"(Experts|MoEMLP)$"),
    ("Router", r"(Router|Gate|Gating)$"),
    ("MoE", r"(MoE|Moe|MoeBlock|SparseMoeBlock|MoEBlock|MoeMLP)$"),
    ("Attention", r"Attention$"),
    ("MLP", r"(MLP|FeedForward|FFN|FeedForwardNetwork)$"),
    ("Norm", r"(RMSNorm|LayerNorm|L2Norm|Norm|RMSNormGated)$"),
    ("DecoderLayer", r"(DecoderLayer|Block|Layer)$"),
    ("Model", r"Model$"),
    ("Mixer", r"(Mixer|DeltaNet|Conv|ShortConv)$"),
)


@dataclass(frozen=True, kw_only=True)
class MethodDiff:
    """One method or function of the two sources.

    Attributes:
        role: the part of the model: "Attention", "MLP", "Norm", ... or "function".
        method: its name.
        verdict: "same", "differs", "only_a" or "only_b"; names of classes, annotations, comments and docstrings aside.
        a, b: where it stands on each side, "Gemma3Attention.forward", or None.
        lines: a unified diff of the normalised texts, empty where they are the same.
    """

    role: str
    method: str
    verdict: str
    a: str | None
    b: str | None
    lines: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "method": self.method,
            "verdict": self.verdict,
            "a": self.a,
            "b": self.b,
            "diff": list(self.lines),
        }


def roles(source: ModelingSource) -> dict[str, ClassSource]:
    """The class of each role, the one nearest to the root where several have it."""
    found: dict[str, ClassSource] = {}
    for name, declared in source.classes.items():
        role = next((role for role, pattern in _ROLES if re.search(pattern, name)), name)
        if role == "MLP" and any(used.endswith("Experts") for used in declared.uses):
            role = "MoE"  # gpt-oss calls its mixture an MLP
        found.setdefault(role, declared)
    return found


def method_diffs(a: ModelingSource | None, b: ModelingSource | None) -> list[MethodDiff]:
    """Compare `forward` of the classes with the same role, and the functions that they call.

    Args:
        a, b: the two sources; with either missing nothing can be compared and the list is empty.
    """
    if a is None or b is None:
        return []
    roles_a, roles_b = roles(a), roles(b)
    found = []
    for role in dict.fromkeys([*roles_b, *roles_a]):
        class_a, class_b = roles_a.get(role), roles_b.get(role)
        forward_a = a.method(class_a.name, "forward") if class_a else None
        forward_b = b.method(class_b.name, "forward") if class_b else None
        if forward_a is not None or forward_b is not None:
            found.append(
                _compare(
                    role,
                    "forward",
                    (forward_a, f"{class_a.name}.forward" if class_a and forward_a else None, _renamed(a)),
                    (forward_b, f"{class_b.name}.forward" if class_b and forward_b else None, _renamed(b)),
                )
            )
    for name in dict.fromkeys([*b.functions, *a.functions]):
        function_a, function_b = a.functions.get(name), b.functions.get(name)
        found.append(
            _compare(
                "function",
                name,
                (function_a, name if function_a else None, _renamed(a)),
                (function_b, name if function_b else None, _renamed(b)),
            )
        )
    return found


_Named = tuple[ast.FunctionDef | None, str | None, Mapping[str, str]]


def _compare(role: str, method: str, a: _Named, b: _Named) -> MethodDiff:
    if a[0] is None or b[0] is None:
        verdict = "only_b" if a[0] is None else "only_a"
        return MethodDiff(role=role, method=method, verdict=verdict, a=a[1], b=b[1])
    before, after = (normalised(function, renamed).splitlines() for function, renamed in ((a[0], a[2]), (b[0], b[2])))
    if before == after:
        return MethodDiff(role=role, method=method, verdict="same", a=a[1], b=b[1])
    lines = tuple(difflib.unified_diff(before, after, fromfile=a[1] or "", tofile=b[1] or "", lineterm="", n=1))
    return MethodDiff(role=role, method=method, verdict="differs", a=a[1], b=b[1], lines=lines)


def _renamed(source: ModelingSource) -> dict[str, str]:
    """Class names as roles, so that LlamaRMSNorm and Gemma3RMSNorm read alike."""
    return {declared.name: role for role, declared in roles(source).items()}


# What a serving model has no use for (training, generation bookkeeping), or what the config rules compare by value.
_NOISE = frozenset(
    {"dropout", "sliding_window", "use_cache", "past_key_values", "past_key_value", "cache_position", "labels"}
    | {"output_router_logits", "output_attentions", "output_hidden_states", "loss", "aux_loss", "router_logits"}
)


class _Normaliser(ast.NodeTransformer):
    def __init__(self, renamed: Mapping[str, str]) -> None:
        self.renamed = renamed

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        self.generic_visit(node)
        # Transformers passes these by name: their order means nothing.
        node.args = sorted((arg for arg in node.args if arg.arg not in _NOISE), key=lambda arg: arg.arg)
        node.kwonlyargs = [arg for arg in node.kwonlyargs if arg.arg not in _NOISE]
        node.defaults, node.kw_defaults = [], [None] * len(node.kwonlyargs)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        node.keywords = sorted(
            (word for word in node.keywords if word.arg not in _NOISE), key=lambda word: word.arg or "~"
        )
        return node

    def visit_If(self, node: ast.If) -> ast.AST | None:
        if {"labels", "output_router_logits", "past_key_values"} & set(re.findall(r"\w+", ast.unparse(node.test))):
            return None
        self.generic_visit(node)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        match node.targets:
            case [ast.Tuple(elts=[kept, ast.Name(id="_" | "attn_weights" | "self_attn_weights")])]:
                node.targets = [kept]  # a second result that nobody reads
        if ast.unparse(node.targets[0]) in _NOISE:
            return None
        self.generic_visit(node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self.renamed.get(node.id, node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        if node.value is None:
            return ast.Pass()
        return ast.copy_location(ast.Assign(targets=[node.target], value=node.value, lineno=node.lineno), node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return None
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func).startswith("logger."):
            return None
        self.generic_visit(node)
        return node


def normalised(function: ast.FunctionDef, renamed: Mapping[str, str]) -> str:
    """A function's text without annotations, decorators, docstrings and log calls, class names as roles."""
    stripped = copy.deepcopy(function)
    stripped.decorator_list = []
    stripped.returns = None
    stripped = _Normaliser(renamed).visit(stripped)
    if not stripped.body:
        stripped.body = [ast.Pass()]
    return ast.unparse(ast.fix_missing_locations(stripped))
