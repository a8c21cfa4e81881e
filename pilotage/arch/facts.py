"""Facts of an architecture that only its modelling source states, evaluated for one config.

Each fact is a value with the expression it came from; None means that the source does not say it in a form that can
be read, never that the value is zero.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from pilotage.arch.modeling import ClassSource, ModelingSource, assignments

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_QUERY_NAMES = ("q_proj", "query", "q_lin")
_FUSED_NAMES = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv")
_OUTPUT_NAMES = ("o_proj", "out_proj", "dense", "c_proj")


class Unreadable(Exception):
    """An expression that cannot be evaluated from a config alone."""


def evaluate(node: ast.expr, config: Any, init: ast.FunctionDef | None) -> Any:
    """Evaluate an expression of an `__init__` from the config and from what that `__init__` assigned.

    Args:
        node: the expression, e.g. `self.head_dim**-0.5`.
        config: the config its `config` names.
        init: the `__init__` that it stands in, to look up `self.<name>` and locals.

    Raises:
        Unreadable: it depends on something else.
    """
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -evaluate(operand, config, init)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not evaluate(operand, config, init)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](evaluate(left, config, init), evaluate(right, config, init))
        case ast.Attribute(value=value, attr=attr) if ast.unparse(value) in ("config", "self.config"):
            if not hasattr(config, attr):
                raise Unreadable(ast.unparse(node))
            return getattr(config, attr)
        case ast.Attribute(value=ast.Name(id="self"), attr=attr):
            return _assigned(attr, node, config, init)
        case ast.Name(id=name):
            return _assigned(name, node, config, init)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return evaluate(body if evaluate(test, config, init) else orelse, config, init)
        case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot() as op], comparators=[right]):
            same = evaluate(left, config, init) is evaluate(right, config, init)
            return same if isinstance(op, ast.Is) else not same
        case ast.BoolOp(op=ast.Or(), values=values):
            return next((value for v in values if (value := evaluate(v, config, init))), None)
        case ast.Call(func=func, args=args):
            return _call(ast.unparse(func), args, node, config, init)
    raise Unreadable(ast.unparse(node))


def _assigned(name: str, node: ast.expr, config: Any, init: ast.FunctionDef | None) -> Any:
    values = [value for value in assignments(init, name) if ast.unparse(value) != ast.unparse(node)]
    if len(values) != 1:  # assigned under conditions: the config alone does not say which
        raise Unreadable(ast.unparse(node))
    return evaluate(values[0], config, init)


def _call(name: str, args: list[ast.expr], node: ast.Call, config: Any, init: ast.FunctionDef | None) -> Any:
    if name == "getattr" and len(args) in (2, 3) and ast.unparse(args[0]) in ("config", "self.config"):
        key = evaluate(args[1], config, init)
        if hasattr(config, key) or len(args) == 2:
            return getattr(config, key)
        return evaluate(args[2], config, init)
    if name in ("math.sqrt", "np.sqrt") and len(args) == 1:
        return math.sqrt(evaluate(args[0], config, init))
    if name in ("float", "int", "torch.tensor", "nn.Buffer") and args:
        value = evaluate(args[0], config, init)
        return int(value) if name == "int" else value
    if name == "yarn_apply_mscale" and len(args) == 2:
        return _yarn_scale(evaluate(args[0], config, init), evaluate(args[1], config, init))
    raise Unreadable(ast.unparse(node))


def _yarn_scale(rope: dict[str, Any], scale: float) -> float:
    """DeepSeek's YaRN: the softmax scale grows by (0.1 mscale_all_dim ln factor + 1) squared (arXiv 2309.00071)."""
    if rope.get("rope_type", "default") == "default" or not rope.get("mscale_all_dim") or rope["factor"] <= 1:
        return scale
    return scale * (0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1.0) ** 2


def _try(node: ast.expr, config: Any, init: ast.FunctionDef | None) -> Any | None:
    try:
        return evaluate(node, config, init)
    except (Unreadable, TypeError, ZeroDivisionError):
        return None


def attention_class(source: ModelingSource) -> ClassSource | None:
    """The class of softmax attention, the one nearest to the root."""
    return next((found for found in source.ending("Attention") if "Linear" not in found.name), None)


def attention_scale(source: ModelingSource, config: Any) -> tuple[float, str] | None:
    """What attention scores are multiplied by, with the expression that says so."""
    attention = attention_class(source)
    if attention is None:
        return None
    init = source.method(attention.name, "__init__")
    for name in ("scaling", "scale", "softmax_scale"):
        values = assignments(init, name)
        if len(values) == 1:
            value = _try(values[0], config, init)
            if isinstance(value, int | float):
                return float(value), f"{attention.name}.{name} = {ast.unparse(values[0])}"
    return None


def embedding_scale(source: ModelingSource, config: Any) -> tuple[float, str] | None:
    """What the embedding output is multiplied by, where the source does so, with the expression."""
    for found in source.ending("Model"):
        init = source.method(found.name, "__init__")
        for value in assignments(init, "embed_tokens"):
            for keyword in value.keywords if isinstance(value, ast.Call) else []:
                if keyword.arg == "embed_scale":
                    scale = _try(keyword.value, config, init)
                    if isinstance(scale, int | float):
                        return float(scale), f"{found.name}: embed_scale={ast.unparse(keyword.value)}"
        for value in assignments(source.method(found.name, "forward"), "normalizer"):
            scale = _try(value, config, init)
            if isinstance(scale, int | float):
                return float(scale), f"{found.name}.forward: normalizer = {ast.unparse(value)}"
    return None


def norm_class(source: ModelingSource) -> ClassSource | None:
    """The file's own norm class with a weight, if it has one."""
    norms = source.ending("RMSNorm", "LayerNorm", "Norm")
    return next((found for found in norms if "weight" in ast.unparse(found.node)), None)


def norm_kind(source: ModelingSource) -> tuple[str, str] | None:
    """ "rms" or "layer", with the class that says so."""
    found = norm_class(source)
    if found is not None:
        text = ast.unparse(found.node)
        # A class named LayerNorm may be the RMS kind (Llama 2's ports, Granite): subtracting a mean tells.
        centred = "layer_norm(" in text or "- mean" in text or "LayerNorm" in found.bases
        return ("layer" if centred else "rms"), found.name
    for used in source.ending("Layer", "Block"):
        if "LayerNorm(" in ast.unparse(used.node):
            return "layer", "nn.LayerNorm"
        if "RMSNorm(" in ast.unparse(used.node):
            return "rms", "nn.RMSNorm"
    return None


def norm_weight_offset(source: ModelingSource) -> tuple[float, str] | None:
    """What is added to a norm's stored weight before it multiplies: 1.0 in most Gemma models, else 0.0."""
    found = norm_class(source)
    if found is None:
        return None
    forward = source.method(found.name, "forward")
    for node in ast.walk(forward) if forward else ():
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            sides = [ast.unparse(node.left), ast.unparse(node.right)]
            number = next((side for side in (node.left, node.right) if isinstance(side, ast.Constant)), None)
            added = number.value if number else None
            if isinstance(added, int | float) and any(side.startswith("self.weight") for side in sides):
                return float(added), f"{found.name}.forward: {ast.unparse(node)}"
    return 0.0, f"{found.name}.forward"


def linear_bias(source: ModelingSource, config: Any, *, output: bool) -> tuple[bool, str] | None:
    """Whether attention's query, key and value (or output) projections have a bias."""
    attention = attention_class(source)
    if attention is None:
        return None
    init = source.method(attention.name, "__init__")
    for name in _OUTPUT_NAMES if output else _QUERY_NAMES + _FUSED_NAMES:
        for value in assignments(init, name):
            if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("Linear"):
                bias = next((keyword.value for keyword in value.keywords if keyword.arg == "bias"), None)
                stated = True if bias is None else _try(bias, config, init)
                if isinstance(stated, bool):
                    text = "bias by default" if bias is None else f"bias={ast.unparse(bias)}"
                    return stated, f"{attention.name}.{name}: {text}"
    return None


def query_key_norm(source: ModelingSource, config: Any) -> tuple[bool, str] | None:
    """Whether queries and keys are normalised before attention."""
    attention = attention_class(source)
    if attention is None:
        return None
    init = source.method(attention.name, "__init__")
    for name in ("q_norm", "qk_norm", "q_layernorm", "query_layernorm"):
        if assignments(init, name):
            switch = next((key for key in ("use_qk_norm", "qk_layernorm", "qk_norm") if hasattr(config, key)), None)
            # A layer may still leave it out; the module tree, built on meta, decides there.
            present = bool(getattr(config, switch)) if switch else True
            return present, f"{attention.name}.{name}"
    return False, attention.name
