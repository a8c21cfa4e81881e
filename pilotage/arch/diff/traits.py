"""What a model does that decides how it is ported, read from its config, module tree and source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pilotage.arch.diff.methods import roles
from pilotage.arch.diff.side import Side
from pilotage.arch.diff.tree import Node, layer_list, ranges
from pilotage.arch.rope import ROPELESS_LAYERS, RopeSpec

QK_NORMS = ("q_norm", "k_norm", "qk_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")
FUSED_QKV = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv")
GATES = ("gate_proj", "w1", "gate_up_proj", "linear_v")
POSITIONS = ("wpe", "embed_positions", "position_embeddings", "position_embedding")
ROUTERS = ("gate", "router", "block_sparse_moe")


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Facts of one language model.

    Attributes:
        layers: the different decoder layers, one node each, folded.
        attention, mlp: the attention and feed-forward nodes of the layers that have them.
        recurrent_kinds: kinds of layers that keep a state instead of keys and values.
        attention_kinds: the kinds of softmax attention layers, in order of appearance.
        layer_pattern: the kinds of layers as the shortest repeating run, as text.
        norms: names of the norms directly in a decoder layer.
        qk_norm: "head" (a weight per head dimension), "projection" (over all heads), "weightless", or None.
        scale: where the attention scale comes from, as text: "head_size", "query_pre_attn_scalar", "1.0", ...
        sinks: attention has learned sinks.
        fused_qkv, fused_gate_up: name of a projection that holds several, or None.
        query_bias, output_bias, mlp_bias, head_bias: biases of projections.
        gated: the MLP multiplies by a gate; None without a dense MLP.
        ropes: the different rotary embeddings, by kind of layer.
        interleaved: rotates neighbouring pairs, not halves.
        positions: name of a learned position embedding, or None.
        parallel: attention and MLP read the same input and add to the same residual.
        router: how experts are chosen, as text, or None.
        shared_expert: name of an expert that every token passes, or None.
        expert_bias: the experts have biases.
        clamped: the experts' activation is clamped (SwiGLU with a limit).
        norm_cast: whether a norm's weight is applied "in fp32" or "after casting back"; None where it cannot be read.
    """

    layers: tuple[Node, ...]
    attention: tuple[Node, ...]
    mlp: tuple[Node, ...]
    recurrent_kinds: tuple[str, ...]
    attention_kinds: tuple[str, ...]
    layer_pattern: str
    norms: tuple[str, ...]
    qk_norm: str | None
    scale: str
    sinks: bool
    fused_qkv: str | None
    fused_gate_up: str | None
    query_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_bias: bool
    gated: bool | None
    ropes: dict[str, RopeSpec]
    interleaved: bool
    positions: str | None
    parallel: bool
    router: str | None
    shared_expert: str | None
    expert_bias: bool
    clamped: bool
    norm_cast: str | None


def traits(side: Side) -> Traits:
    """Read the traits of one model; where its tree could not be built, the config and source decide alone."""
    spec = side.spec
    found = layer_list(side.tree, spec.num_layers) if side.tree else None
    layers = found[1].children if found else ()
    attention = tuple(node for layer in layers if (node := _attention(layer)) is not None)
    mlp = tuple(node for layer in layers if (node := _mlp(layer)) is not None)
    kinds = dict.fromkeys(spec.layer_types)
    text = _source_text(side)
    return Traits(
        layers=layers,
        attention=attention,
        mlp=mlp,
        recurrent_kinds=tuple(kind for kind in kinds if kind in ROPELESS_LAYERS),
        attention_kinds=tuple(kind for kind in kinds if kind not in ROPELESS_LAYERS),
        layer_pattern=pattern(spec.layer_types),
        norms=_norms(layers),
        qk_norm=_qk_norm(attention, side),
        scale=_scale(side),
        sinks=any("sink" in name for node in attention for name in node.shapes),
        fused_qkv=_first_child(attention, FUSED_QKV),
        fused_gate_up=_first_child(mlp, ("gate_up_proj",)),
        query_bias=_bias(attention, ("q_proj", *FUSED_QKV), spec.attention_bias),
        output_bias=_bias(attention, ("o_proj", "out_proj", "dense", "c_proj"), spec.attention_output_bias),
        mlp_bias=_bias(mlp, ("down_proj", "c_proj", "fc2", "dense_4h_to_h", "w2"), spec.mlp_bias),
        head_bias=bool(side.tree and (head := side.tree.child("lm_head", "embed_out")) and "bias" in head.shapes),
        gated=_gated(mlp),
        ropes=_ropes(side),
        interleaved=_interleaved(side, text),
        positions=_first_child(_stems(side), POSITIONS),
        parallel=_parallel(side, layers),
        router=_router(side, mlp),
        shared_expert=_first_child(mlp, ("shared_experts", "shared_expert", "shared_mlp")),
        expert_bias=any("bias" in name for node in mlp for _, part in node.walk() for name in _expert_shapes(part)),
        clamped=getattr(side.spec, "num_experts", None) is not None and side.fields.get("swiglu_limit") is not None,
        norm_cast=_norm_cast(side),
    )


def pattern(kinds: Iterable[str]) -> str:
    """The shortest run that repeats, else the runs: ("s", "s", "f", "s", "s", "f") is "2 s, 1 f, repeating"."""
    kinds = tuple(kinds)
    if len(set(kinds)) == 1:
        return f"all {kinds[0]}"
    period = next((p for p in range(1, len(kinds)) if all(k == kinds[i % p] for i, k in enumerate(kinds))), 0)
    run = kinds[: period or len(kinds)]
    words: list[list[Any]] = []
    for kind in run:
        if words and words[-1][1] == kind:
            words[-1][0] += 1
        else:
            words.append([1, kind])
    if len(words) > 8:
        return ", ".join(f"{kind} in {ranges([i for i, k in enumerate(kinds) if k == kind])}" for kind in set(kinds))
    return ", ".join(f"{count} {kind}" for count, kind in words) + (", repeating" if period else "")


def _attention(layer: Node) -> Node | None:
    named = layer.child("self_attn", "attn", "attention", "self_attention")
    return named or next((child for child in layer.children if child.kind.endswith("Attention")), None)


def _mlp(layer: Node) -> Node | None:
    named = layer.child("mlp", "feed_forward", "block_sparse_moe", "ffn", "moe")
    kinds = re.compile(r"(MLP|FeedForward|MoE|Moe)$")
    return named or next((child for child in layer.children if kinds.search(child.kind)), None)


def _first_child(nodes: Iterable[Node], names: tuple[str, ...]) -> str | None:
    return next((child.name for node in nodes if (child := node.child(*names)) is not None), None)


def _stems(side: Side) -> list[Node]:
    return [side.tree, *side.tree.children] if side.tree else []


def _norms(layers: Iterable[Node]) -> tuple[str, ...]:
    names = [
        child.name
        for layer in layers
        for child in layer.children
        # The norm of a further input, of the width of the stream, is not a norm of the two branches.
        if (child.kind.endswith("Norm") or re.match(r"(ln_?\d|.*layer_?norm)", child.name))
        and "per_layer" not in child.name
    ]
    return tuple(dict.fromkeys(names))


def _qk_norm(attention: tuple[Node, ...], side: Side) -> str | None:
    if not attention:
        return "head" if side.spec.qk_norm else None
    for node in attention:
        norm = node.child(*QK_NORMS)
        if norm is not None:
            weight = norm.shapes.get("weight")
            if weight is None:
                return "weightless"
            sizes = {layer.get("head_dim") for layer in side.spec.per_layer_config.values()} | {side.spec.head_size}
            return "head" if weight[-1] in sizes and len(weight) == 1 else "projection"
    return None


def _scale(side: Side) -> str:
    field = side.spec.fields["attn_scale"]
    key = (field.source_key or "").removeprefix("text_config.")
    if key in ("query_pre_attn_scalar", "attention_multiplier"):
        return key
    size = side.spec.head_size
    if field.value is None or (size and abs(field.value - size**-0.5) < 1e-12):
        return "head_size"
    return key.rpartition(" = ")[2] or f"{field.value:g}"


def _bias(nodes: tuple[Node, ...], names: tuple[str, ...], otherwise: Any) -> bool:
    for node in nodes:
        child = node.child(*names)
        if child is not None:
            return "bias" in child.shapes
    return bool(otherwise) if not nodes else False


def _gated(mlp: tuple[Node, ...]) -> bool | None:
    dense = [node for node in mlp if node.child("down_proj", "c_proj", "fc2", "dense_4h_to_h", "w2", "c_fc")]
    return any(node.child(*GATES) for node in dense) if dense else None


def _ropes(side: Side) -> dict[str, RopeSpec]:
    return {kind: rope for kind, rope in side.spec.rope.items() if isinstance(rope, RopeSpec)}


def _source_text(side: Side) -> str:
    functions = side.source.functions.values() if side.source else ()
    return "\n".join(ast.unparse(function) for function in functions)


def _interleaved(side: Side, text: str) -> bool:
    if "rope_interleave" in side.fields or not side.spec.rope:
        return bool(side.spec.rope_interleave)
    return "view_as_complex" in text or bool(re.search(r"\.\.\., (0|1)?::2", text))


def _parallel(side: Side, layers: Iterable[Node]) -> bool:
    for switch in ("use_parallel_residual", "parallel_attn"):
        if switch in side.fields:
            return bool(side.fields[switch])
    forward = _forward(side, "DecoderLayer")
    added = r"residual \+ \w*att\w* \+ \w+|= \w*att\w* \+ \w*(feed_forward|mlp)\w* \+ residual"
    return bool(re.search(added, forward))


def _forward(side: Side, role: str) -> str:
    if side.source is None:
        return ""
    declared = roles(side.source).get(role)
    forward = side.source.method(declared.name, "forward") if declared else None
    return ast.unparse(forward) if forward else ""


def _methods(side: Side, role: str) -> list[ast.FunctionDef]:
    declared = roles(side.source).get(role) if side.source else None
    return list(declared.methods.values()) if declared else []


def _norm_cast(side: Side) -> str | None:
    declared = roles(side.source).get("Norm") if side.source else None
    forward = side.source.method(declared.name, "forward") if side.source and declared else None
    last = forward.body[-1] if forward and forward.body else None
    if not isinstance(last, ast.Return) or last.value is None:
        return None
    if isinstance(last.value, ast.Call) and isinstance(last.value.func, ast.Attribute):
        return "in fp32" if last.value.func.attr in ("to", "type_as") else None
    if isinstance(last.value, ast.BinOp) and "self.weight" in ast.unparse(last.value):
        return "after casting back"
    return None


def _expert_shapes(node: Node) -> list[str]:
    return list(node.shapes) if "xperts" in node.kind else []


def _router(side: Side, mlp: tuple[Node, ...]) -> str | None:
    if side.spec.num_experts is None:
        return None
    # The MoE's own methods score where the router only projects; its experts come last.
    text = "\n".join(_forward(side, role) for role in ("Router", "MoE"))
    text += "\n".join(ast.unparse(part) for part in _methods(side, "MoE") if "rout" in part.name)
    scores, chosen = text.find("softmax"), text.find("topk")
    if scores < 0 and "sigmoid" in text:
        words = ["sigmoid of the scores"]
    elif 0 <= chosen < scores:
        words = ["softmax over the chosen"]
    else:
        words = ["softmax over all"]
    divides = re.search(r"/= .*sum\(|/ .*\.sum\(|/= denominator", text)
    if any("correction_bias" in name for node in mlp for _, part in node.walk() for name in part.shapes):
        words.append("with a correction bias that chooses but does not weigh")
    groups = side.fields.get("n_group") or 1
    if isinstance(groups, int) and groups > 1:
        words.append(f"limited to {side.fields.get('topk_group')} of {groups} groups")
    if side.spec.norm_topk_prob or (side.spec.norm_topk_prob is None and divides):
        words.append("weights renormalised over the chosen")
    if side.spec.routed_scaling not in (None, 1.0):
        words.append(f"times {side.spec.routed_scaling:g}")
    return ", ".join(words)
