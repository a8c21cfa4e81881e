"""What no rule explained: modules and methods that differ. They are work too, even where nobody has named them yet."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from pilotage.arch.diff.methods import MethodDiff, method_diffs
from pilotage.arch.diff.tree import Node
from pilotage.arch.diff.work import (
    ATTENTION,
    ATTENTION_FORWARD,
    ATTENTION_INIT,
    EMBEDDING,
    LAYER_FORWARD,
    LAYER_INIT,
    MLP,
    MLP_FORWARD,
    MLP_INIT,
    MODEL_FORWARD,
    MODEL_INIT,
    NORM,
    SPECIAL,
    Pair,
    WorkItem,
    claimed,
    item,
)

# Modules without weights that serve nothing, or that other rules read through the config.
_IDLE = re.compile(r"(Dropout|Identity|Activation|GELU|SiLU|ReLU|RotaryEmbedding|Tanh)")
# Places of the same thing under other names.
_ALIASES = ((r"^(attn|attention|self_attention)\b", "self_attn"), (r"^(feed_forward|block_sparse_moe|ffn)\b", "mlp"))
_ROOT_ALIASES = {"wte": "embed_tokens", "embed_in": "embed_tokens", "word_embeddings": "embed_tokens", "h": "layers"}
_ROOT_ALIASES |= {"ln_f": "norm", "final_layer_norm": "norm", "final_layernorm": "norm"}


def unexplained(pair: Pair, found: list[WorkItem]) -> Iterator[WorkItem]:
    """Items for modules of one side, and methods that differ, that no item in `found` explains."""
    modules = [*_modules(pair, found)]
    yield from modules
    yield from _methods(pair, [*found, *modules])


def _modules(pair: Pair, found: list[WorkItem]) -> Iterator[WorkItem]:
    in_a, in_b = ({**_inside(side.layers), **_around(model)} for side, model in ((pair.ta, pair.a), (pair.tb, pair.b)))
    if not in_a or not in_b:
        return
    for here, there, side, verb in ((in_b, in_a, pair.b, "new"), (in_a, in_b, pair.a, "gone")):
        reported: list[str] = []
        for path, node in here.items():
            inside = any(path.startswith(f"{parent}.") for parent in reported)
            if path in there or inside or claimed(path, found) or _IDLE.search(node.kind):
                continue
            reported.append(path)
            row, places = _place(path)
            what = f"{path}: {node.text()}"
            if verb == "new":
                yield item(row, places, f"New module {path}", f"{what}; {pair.a.label} has nothing of this name")
            else:
                yield item(row, places, f"Leave {path} out", f"{what} is in {side.label} only")


def _inside(layers: Iterable[Node]) -> dict[str, Node]:
    """Everything in the decoder layers, by path relative to the layer."""
    found: dict[str, Node] = {}
    for layer in layers:
        for path, node in layer.walk():
            for pattern, name in _ALIASES:
                path = re.sub(pattern, name, path)
            if path:
                found.setdefault(path, node)
            for parameter, shape in node.shapes.items():
                if parameter not in ("weight", "bias"):
                    key = f"{path}.{parameter}" if path else parameter
                    found.setdefault(key, Node(name=parameter, kind="parameter", shapes={"weight": shape}))
    return found


def _around(side: object) -> dict[str, Node]:
    """What stands beside the decoder layers: embedding, final norm, head."""
    tree: Node | None = getattr(side, "tree", None)
    if tree is None:
        return {}
    stems = [child for child in tree.children if child.child("layers", "h", "blocks", "block")] or [tree]
    return {
        _ROOT_ALIASES.get(child.name, child.name): child
        for stem in stems
        for child in stem.children
        if child.kind != "ModuleList"
    }


def _place(path: str) -> tuple[str, tuple[str, ...]]:
    if path.startswith("self_attn"):
        return ATTENTION, (ATTENTION_INIT, ATTENTION_FORWARD)
    if path.startswith("mlp"):
        return MLP, (MLP_INIT, MLP_FORWARD)
    if "embed" in path:
        return EMBEDDING, (MODEL_INIT, MODEL_FORWARD)
    if "norm" in path:
        return NORM, (LAYER_INIT, LAYER_FORWARD)
    return SPECIAL, (LAYER_INIT, LAYER_FORWARD)


_METHOD_PLACES = {
    "Attention": (ATTENTION, ATTENTION_FORWARD),
    "MLP": (MLP, MLP_FORWARD),
    "DecoderLayer": (SPECIAL, LAYER_FORWARD),
    "Norm": (NORM, LAYER_INIT),
}


def _methods(pair: Pair, found: list[WorkItem]) -> Iterator[WorkItem]:
    for method in method_diffs(pair.a.source, pair.b.source):
        if method.role not in _METHOD_PLACES or method.verdict != "differs":
            continue
        row, place = _METHOD_PLACES[method.role]
        touched = any(place in each.touches.split("; ") for each in found)
        if (touched and method.role != "Norm") or claimed(f"{method.role}.forward", found):
            continue
        yield item(row, place, f"{method.b} differs in the source", _told(method))


def _told(method: MethodDiff) -> str:
    changed = [line for line in method.lines if line[:1] in "+-" and not line.startswith(("+++", "---"))]
    shown = " | ".join(f"{line[0]} {line[1:].strip()}" for line in changed[:4])
    more = f" and {len(changed) - 4} lines more" if len(changed) > 4 else ""
    return f"not explained by config or modules; against {method.a}: {shown}{more}"
