"""Rules of the rows "Heterogeneous layers" and "Position encoding"."""

from __future__ import annotations

from collections.abc import Iterator

from pilotage.arch.diff.traits import POSITIONS, pattern
from pilotage.arch.diff.tree import Node
from pilotage.arch.diff.work import (
    ATTENTION_FORWARD,
    ATTENTION_INIT,
    FROM_CONFIGS,
    LAYER_INIT,
    LAYERS,
    MODEL_FORWARD,
    MODEL_INIT,
    POSITION,
    Pair,
    WorkItem,
    item,
    rule,
)
from pilotage.arch.rope import RopeSpec


@rule
def attention_pattern(pair: Pair) -> Iterator[WorkItem]:
    a, b = pair.ta.attention_kinds, pair.tb.attention_kinds
    names = {"full_attention": "full", "sliding_attention": "sliding", "chunked_attention": "chunked"}
    if len(b) > 1 and set(b) - set(a):
        kinds = " and ".join(names.get(kind, kind) for kind in b)
        window = f"; a sliding layer sees {pair.b.spec.sliding_window} tokens" if "sliding_attention" in b else ""
        yield item(
            LAYERS,
            (ATTENTION_INIT, MODEL_FORWARD, FROM_CONFIGS),
            f"Layer pattern: {kinds} attention",
            f"layer_types: {pair.tb.layer_pattern}{window}; {pair.a.label} has {pair.ta.layer_pattern}",
            reads=("layer_types", "sliding_window"),
        )
    elif len(b) == 1 and len(a) > 1:
        why = f"every layer of {pair.b.label} is {b[0]}; {pair.a.label} has {pair.ta.layer_pattern}"
        yield item(LAYERS, (ATTENTION_INIT, MODEL_FORWARD), "One kind of attention layer", why)
    elif len(b) > 1 and pair.ta.layer_pattern != pair.tb.layer_pattern:
        yield item(
            LAYERS,
            FROM_CONFIGS,
            f"Layer pattern: {pair.tb.layer_pattern}",
            f"layer_types; {pair.a.label} has {pair.ta.layer_pattern}. Read it, do not compute it: counting layers "
            "from one, or a pattern written into the code, inverts it unseen until a prompt passes the window",
            reads=("layer_types", "sliding_window"),
        )


@rule
def sizes_by_layer(pair: Pair) -> Iterator[WorkItem]:
    if pair.b.spec.per_layer_config and not pair.a.spec.per_layer_config:
        kinds: dict[str, list[int]] = {}
        for layer, values in pair.b.spec.per_layer_config.items():
            kinds.setdefault(", ".join(f"{key} {value}" for key, value in values.items()), []).append(layer)
        told = "; ".join(f"{text} in {len(layers)} layers from {layers[0]}" for text, layers in kinds.items())
        yield item(
            LAYERS,
            (ATTENTION_INIT, FROM_CONFIGS),
            "Sizes that differ between layers",
            f"per_layer_config: {told}; elsewhere head_dim {pair.b.spec.head_size} and {pair.b.spec.num_kv_heads} KV "
            "heads",
            reads=("per_layer_config",),
        )


@rule
def widths_by_layer(pair: Pair) -> Iterator[WorkItem]:
    def widths(layers: tuple[Node, ...]) -> dict[str, int]:
        return {
            layer.name: down.shapes["weight"][-1]
            for layer in layers
            if (mlp := layer.child("mlp")) and (down := mlp.child("down_proj")) and "weight" in down.shapes
        }

    a, b = widths(pair.ta.layers), widths(pair.tb.layers)
    if len(set(b.values())) > 1 and len(set(a.values())) < 2:
        told = ", ".join(f"{width} in layers {name}" for name, width in b.items())
        yield item(LAYERS, (LAYER_INIT, FROM_CONFIGS), "MLP widths that differ between layers", told)


@rule
def dense_and_sparse(pair: Pair) -> Iterator[WorkItem]:
    a, b = (set(side.spec.mlp_layer_types) for side in (pair.a, pair.b))
    if len(b) > 1 and len(a) == 1:
        yield item(
            LAYERS,
            LAYER_INIT,
            "Dense and sparse MLP layers",
            f"the MLPs are {pattern(pair.b.spec.mlp_layer_types)}",
            reads=("mlp_layer_types",),
        )


def _different(ropes: dict[str, RopeSpec]) -> list[RopeSpec]:
    found: list[RopeSpec] = []
    for rope in ropes.values():
        if all(rope.to_json() != other.to_json() for other in found):
            found.append(rope)
    return found


def _count(number: int) -> str:
    return {2: "Two", 3: "Three"}.get(number, str(number))


@rule
def rope_per_kind(pair: Pair) -> Iterator[WorkItem]:
    a, b = _different(pair.ta.ropes), _different(pair.tb.ropes)
    if len(b) > 1 and len(a) < 2:
        told = "; ".join(f"{kind}: theta {rope.theta:g}, {rope.kind}" for kind, rope in pair.tb.ropes.items())
        bases = {rope.theta for rope in b}
        yield item(
            POSITION,
            (MODEL_FORWARD, FROM_CONFIGS),
            f"{_count(len(bases))} RoPE bases, by kind of layer" if len(bases) > 1 else "RoPE by kind of layer",
            f"{told}; {pair.a.label} has one for all layers",
            reads=("rope", "layer_types"),
        )
    elif len(a) > 1 and len(b) == 1:
        why = f"{pair.b.label} rotates all layers alike, theta {b[0].theta:g}"
        yield item(POSITION, (MODEL_FORWARD, FROM_CONFIGS), "One RoPE for all layers", why, reads=("rope",))


@rule
def rope_kind(pair: Pair) -> Iterator[WorkItem]:
    known = {rope.kind for rope in pair.ta.ropes.values()} | {"default"}
    for kind in dict.fromkeys(rope.kind for rope in pair.tb.ropes.values()):
        if kind in known:
            continue
        layers = [name for name, rope in pair.tb.ropes.items() if rope.kind == kind]
        rope = pair.tb.ropes[layers[0]]
        where = "" if len(layers) == len(pair.tb.ropes) else f" on {', '.join(layers)} layers only"
        factor = f", factor {rope.factor:g}" if rope.factor else ""
        extra = ""
        if kind == "yarn":
            extra = "; it scales cos and sin as well" + (
                f", and the softmax scale by mscale_all_dim {rope.mscale_all_dim:g}" if rope.mscale_all_dim else ""
            )
        yield item(
            POSITION,
            FROM_CONFIGS,
            f"RoPE scaling: {kind}",
            f"rope_type {kind}{factor}{where}{extra}; {pair.a.label} has {' and '.join(sorted(known))}",
            reads=("rope",),
        )


@rule
def partial_rotation(pair: Pair) -> Iterator[WorkItem]:
    # The proportional kind keeps the whole head's frequencies and zeroes some: it is a scaling of its own.
    ropes = ([r for r in side.ropes.values() if r.kind != "proportional"] for side in (pair.ta, pair.tb))
    a, b = ({rope.partial_rotary_factor for rope in side} for side in ropes)
    if b - {1.0} and not a - {1.0}:
        share = min(b)
        yield item(
            POSITION,
            (ATTENTION_FORWARD, FROM_CONFIGS),
            "Partial rotation",
            f"only a share of {share:g} of each head is rotated, the rest passes",
            reads=("rope",),
        )


@rule
def rotation_style(pair: Pair) -> Iterator[WorkItem]:
    if pair.tb.ropes and pair.ta.ropes and pair.ta.interleaved != pair.tb.interleaved:
        style = "neighbouring pairs (interleaved)" if pair.tb.interleaved else "the two halves of a head"
        yield item(
            POSITION,
            ATTENTION_FORWARD,
            "Interleaved rotation" if pair.tb.interleaved else "Rotation by halves",
            f"{pair.b.label} rotates {style}",
            reads=("rope_interleave",),
        )


@rule
def layers_without_rope(pair: Pair) -> Iterator[WorkItem]:
    if pair.new("nope_layers", ()):
        layers = pair.b.spec.nope_layers
        why = f"no_rope_layers: {len(layers)} layers, from {layers[0]} on, do not rotate"
        yield item(POSITION, ATTENTION_FORWARD, "Layers without RoPE", why, reads=("nope_layers",))


@rule
def several_axes(pair: Pair) -> Iterator[WorkItem]:
    a, b = (any("mrope_section" in r.raw for r in side.ropes.values()) for side in (pair.ta, pair.tb))
    if b and not a:
        sections = next(r.raw["mrope_section"] for r in pair.tb.ropes.values() if "mrope_section" in r.raw)
        yield item(
            POSITION,
            MODEL_FORWARD,
            "Positions on several axes (M-RoPE)",
            f"mrope_section {sections}: time, height and width of an image token; for text all three are the position, "
            "so a text-only port may use plain RoPE",
            reads=("rope",),
            claims=("Attention.forward",),
        )


@rule
def learned_positions(pair: Pair) -> Iterator[WorkItem]:
    a, b = pair.ta.positions, pair.tb.positions
    if b is not None and a is None:
        yield item(
            POSITION,
            (MODEL_INIT, MODEL_FORWARD),
            "Learned position embedding",
            f"{b} is added to the token embedding{'; there is no RoPE' if not pair.tb.ropes else ''}",
            claims=(rf"(.*\.)?({'|'.join(POSITIONS)})(\..*)?", r"(.*\.)?rotary_emb"),
        )
    elif pair.ta.ropes and not pair.tb.ropes and b is None:
        alibi = bool(pair.b.fields.get("alibi"))
        title = "ALiBi in place of RoPE" if alibi else "No RoPE"
        yield item(
            POSITION, ATTENTION_FORWARD, title, f"{pair.b.label} has no rotary embedding", claims=("rotary_emb",)
        )
    elif pair.tb.ropes and not pair.ta.ropes:
        theta = next(iter(pair.tb.ropes.values())).theta
        why = f"{pair.b.label} rotates queries and keys, theta {theta:g}; {pair.a.label} does not"
        yield item(POSITION, (ATTENTION_FORWARD, MODEL_FORWARD), "RoPE", why, reads=("rope",), claims=("rotary_emb",))
