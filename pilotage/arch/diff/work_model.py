"""Rules of the rows "Config structure", "Embedding" and "Special features"."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pilotage.arch.diff.work import (
    CONFIG,
    EMBEDDING,
    FROM_CONFIGS,
    HEAD_FORWARD,
    HEAD_INIT,
    LAYER_FORWARD,
    LAYER_INIT,
    MODEL_FORWARD,
    MODEL_INIT,
    SPECIAL,
    WEIGHT_MAP,
    Pair,
    WorkItem,
    item,
    rule,
)


@rule
def wrapper(pair: Pair) -> Iterator[WorkItem]:
    a, b = pair.a.spec.wrapper_type, pair.b.spec.wrapper_type
    if b is not None and a is None:
        nested = (pair.b.spec.fields["hidden_size"].source_key or "").rpartition(".")[0]
        place = f"under {nested}" if nested else "beside the encoders' keys, flat"
        yield item(
            CONFIG,
            (FROM_CONFIGS, WEIGHT_MAP),
            "Language model inside a multimodal one",
            f"model_type {b} wraps {pair.b.spec.model_type}: its keys stand {place}, its tensors under a prefix of "
            "their own, and flags such as tie_word_embeddings on either level",
        )
    elif a is not None and b is None:
        why = f"{pair.b.label} is a language model by itself; {pair.a.label} is wrapped by {a}"
        yield item(CONFIG, (FROM_CONFIGS, WEIGHT_MAP), "Flat config and plain tensor names", why)


@rule
def unread_keys(pair: Pair) -> Iterator[WorkItem]:
    known = {"use_bidirectional_attention", "n_group", "topk_group", "swiglu_alpha", "swiglu_limit", "text_config"}
    known |= {key.rpartition(".")[2] for key in pair.a.spec.unread}
    # A key that the modelling source never names changes nothing there, whatever the file says.
    source = pair.b.source.path.read_text() if pair.b.source else None
    told = [
        key
        for key in pair.b.spec.unread
        if key.rpartition(".")[2] not in known
        and (source is None or re.search(rf"\b{re.escape(key.rpartition('.')[2])}\b", source))
        and not key.endswith(("_token_id", "_token_index", "_tokens_per_image"))
        and not key.startswith("vision")
        and _value(pair, key) not in (None, False, [], {}, "")
    ]
    if told:
        shown = ", ".join(f"{key} = {_short(_value(pair, key))}" for key in told)
        yield item(
            CONFIG,
            FROM_CONFIGS,
            f"Config keys of its own: {', '.join(key.rpartition('.')[2] for key in told)}",
            f"{shown}: the modelling source reads them and nothing here knows what they mean",
        )


def _value(pair: Pair, key: str) -> object:
    value: object = pair.b.raw
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) < 40 else f"{text[:37]}..."


@rule
def head(pair: Pair) -> Iterator[WorkItem]:
    a, b = bool(pair.a.spec.tie_word_embeddings), bool(pair.b.spec.tie_word_embeddings)
    key = pair.b.spec.fields["tie_word_embeddings"]
    said = "" if key.stated else " (the config class's default: the file does not say so)"
    if b and not a:
        why = f"{key.source_key} is true{said}: lm_head.weight is loaded from the embedding's tensor"
        yield item(EMBEDDING, WEIGHT_MAP, "Tied head", why, reads=("tie_word_embeddings",))
    elif a and not b:
        why = f"{key.source_key} is false{said}: lm_head.weight is a tensor of its own"
        yield item(EMBEDDING, WEIGHT_MAP, "Head with weights of its own", why, reads=("tie_word_embeddings",))
    if pair.tb.head_bias and not pair.ta.head_bias:
        why = "lm_head has a bias"
        yield item(EMBEDDING, HEAD_INIT, "Bias on the head", why, claims=(r"lm_head\.bias",))


@rule
def embedding_scale(pair: Pair) -> Iterator[WorkItem]:
    a, b = pair.a.spec.embedding_scale, pair.b.spec.embedding_scale
    source = (pair.b.spec.fields["embedding_scale"].source_key or "").removeprefix("source: ")
    if b != 1.0 and a == 1.0:
        unsaid = ", rounded to the dtype first; no config key of its own says so" if "hidden_size" in source else ""
        yield item(
            EMBEDDING,
            MODEL_INIT,
            "Scaled embedding",
            f"{source}: embeddings are multiplied by {b:g}{unsaid}",
            reads=("embedding_scale",),
            claims=(r"embed_tokens",),
        )
    elif b == 1.0 and a != 1.0:
        why = f"{pair.b.label} uses embeddings as they are; {pair.a.label} multiplies them by {a:g}"
        yield item(EMBEDDING, MODEL_INIT, "Embedding without a scale", why)


@rule
def per_layer_inputs(pair: Pair) -> Iterator[WorkItem]:
    if pair.new("per_layer_input_size", 0):
        yield item(
            EMBEDDING,
            (MODEL_INIT, MODEL_FORWARD, LAYER_INIT, LAYER_FORWARD),
            "Per-layer input embeddings",
            f"hidden_size_per_layer_input {pair.b.spec.per_layer_input_size}: a second embedding table gives every "
            "layer an input of its own, gated in and projected back",
            reads=("per_layer_input_size",),
            claims=(r".*per_layer.*", r"act_fn"),
        )


@rule
def logit_softcap(pair: Pair) -> Iterator[WorkItem]:
    if pair.new("logit_softcap"):
        why = f"final_logit_softcapping {pair.b.spec.logit_softcap:g}: logits go through cap * tanh(logits / cap)"
        yield item(SPECIAL, HEAD_FORWARD, "Softcap on the logits", why, reads=("logit_softcap",))
    elif pair.gone("logit_softcap"):
        why = f"{pair.b.label} has no final_logit_softcapping; {pair.a.label} caps at {pair.a.spec.logit_softcap:g}"
        yield item(SPECIAL, HEAD_FORWARD, "Leave the softcap on the logits out", why, reads=("logit_softcap",))


@rule
def multipliers(pair: Pair) -> Iterator[WorkItem]:
    places = {"residual_multiplier": LAYER_FORWARD, "logit_multiplier": HEAD_FORWARD}
    for name, place in places.items():
        a, b = getattr(pair.a.spec, name), getattr(pair.b.spec, name)
        if b != 1.0 and a == 1.0:
            what = "each branch before it is added" if name == "residual_multiplier" else "the logits"
            key = pair.b.spec.fields[name].source_key
            yield item(
                SPECIAL,
                place,
                f"{name.replace('_', ' ').capitalize()}",
                f"{key}: {what} is multiplied by {b:g}; a slip keeps the top token",
                reads=(name,),
            )


@rule
def parallel_branches(pair: Pair) -> Iterator[WorkItem]:
    if pair.tb.parallel and not pair.ta.parallel:
        why = "attention and MLP both read the layer's input and both are added to it"
        yield item(SPECIAL, LAYER_FORWARD, "Parallel attention and MLP", why)
    elif pair.ta.parallel and not pair.tb.parallel:
        why = f"in {pair.b.label} the MLP reads the sum of input and attention"
        yield item(SPECIAL, LAYER_FORWARD, "Attention and MLP one after the other", why)


@rule
def encoders(pair: Pair) -> Iterator[WorkItem]:
    kinds = set(pair.b.spec.modalities) - set(pair.a.spec.modalities)
    if kinds:
        parts = ", ".join(f"{part.name} ({part.kind}, {_size(part.num_parameters)})" for part in pair.b.encoders)
        yield item(
            SPECIAL,
            (FROM_CONFIGS, WEIGHT_MAP),
            f"{' and '.join(sorted(kinds)).capitalize()} encoder",
            f"beside the language model: {parts or 'an encoder'}; a text-only port drops these tensors with a declared "
            "reason and refuses such inputs",
            reads=("modalities",),
        )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"


@rule
def bidirectional(pair: Pair) -> Iterator[WorkItem]:
    now, before = (side.fields.get("use_bidirectional_attention") for side in (pair.b, pair.a))
    if now and not before:
        over = "image tokens" if now == "vision" else "all tokens"
        why = f"use_bidirectional_attention {now!r}: {over} see each other both ways"
        yield item(SPECIAL, MODEL_FORWARD, "Bidirectional attention", why)


@rule
def quantised(pair: Pair) -> Iterator[WorkItem]:
    a, b = pair.a.spec.quantization, pair.b.spec.quantization
    if b is not None and a != b:
        yield item(
            SPECIAL,
            WEIGHT_MAP,
            f"Checkpoint quantised as {b}",
            f"quantization_config: quant_method {b}; dequantise while loading, or pick a variant in the factory",
            reads=("quantization",),
        )


@rule
def draft_layers(pair: Pair) -> Iterator[WorkItem]:
    key = pair.b.spec.fields["num_mtp_layers"]
    if pair.new("num_mtp_layers", 0) and key.stated:
        count, last = pair.b.spec.num_mtp_layers, pair.b.spec.num_layers
        yield item(
            SPECIAL,
            WEIGHT_MAP,
            "Multi-token prediction layers",
            f"{key.source_key} {count}: the checkpoint holds draft layers from model.layers.{last} on; drop them with "
            "a declared reason, or serve them as a speculator",
            reads=("num_mtp_layers",),
        )
