"""Rules of the row "Attention method"."""

from __future__ import annotations

from collections.abc import Iterator

from pilotage.arch.diff.traits import QK_NORMS
from pilotage.arch.diff.work import (
    ATTENTION,
    ATTENTION_FORWARD,
    ATTENTION_INIT,
    FROM_CONFIGS,
    LAYER_INIT,
    WEIGHT_MAP,
    Pair,
    WorkItem,
    item,
    rule,
)


@rule
def latent_attention(pair: Pair) -> Iterator[WorkItem]:
    if pair.new("kv_lora_rank"):
        spec = pair.b.spec
        queries = f"queries through a rank of {spec.q_lora_rank}, " if spec.q_lora_rank else ""
        yield item(
            ATTENTION,
            (ATTENTION_INIT, ATTENTION_FORWARD),
            "Latent attention (MLA)",
            f"{queries}keys and values through a rank of {spec.kv_lora_rank}; heads of {spec.qk_nope_head_dim} "
            f"unrotated and {spec.qk_rope_head_dim} rotated dimensions, values of {spec.v_head_dim}, one rotated key "
            "for all heads; what is cached has another width than K and V of the donor",
            reads=("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
            claims=(r".*self_attn\.(q_|kv_)(a|b)_.*", r".*self_attn\.(q|k|v)_proj.*", r".*self_attn\.o_proj.*"),
        )
    elif pair.gone("kv_lora_rank"):
        yield item(
            ATTENTION,
            (ATTENTION_INIT, ATTENTION_FORWARD),
            "Grouped-query attention in place of latent attention",
            f"{pair.b.label} has no kv_lora_rank: plain q, k and v projections",
            claims=(r".*self_attn\..*",),
        )


@rule
def recurrent_layers(pair: Pair) -> Iterator[WorkItem]:
    new = [kind for kind in pair.tb.recurrent_kinds if kind not in pair.ta.recurrent_kinds]
    if new:
        yield item(
            ATTENTION,
            (LAYER_INIT, ATTENTION_FORWARD),
            f"Layers that keep a state: {', '.join(new)}",
            f"layers are {pair.tb.layer_pattern}; these have no keys and values but a recurrent state, which the paged "
            "KV cache does not hold",
            reads=("layer_types",),
            claims=(r".*(linear_attn|mamba|mixer|conv|temporal_block|ssm).*",),
        )


@rule
def query_key_norm(pair: Pair) -> Iterator[WorkItem]:
    a, b = pair.ta.qk_norm, pair.tb.qk_norm
    names = tuple(rf".*\.{name}(\..*)?" for name in QK_NORMS)
    if b is not None and a != b:
        over = {
            "head": "each head of queries and keys by itself, one weight per head dimension",
            "projection": "the whole query and key projection, before it is split into heads",
            "weightless": "queries and keys, without a weight",
        }[b]
        found = next((name for name in QK_NORMS if any(node.child(name) for node in pair.tb.attention)), "q_norm")
        yield item(
            ATTENTION,
            (ATTENTION_INIT, ATTENTION_FORWARD),
            "QK-norm",
            f"self_attn.{found} normalises {over}; {pair.a.label} has {'none' if a is None else f'one of kind {a!r}'}",
            reads=("qk_norm", "norm_eps"),
            claims=names,
        )
    elif a is not None and b is None:
        yield item(
            ATTENTION,
            (ATTENTION_INIT, ATTENTION_FORWARD),
            "Leave QK-norm out",
            f"{pair.b.label} does not normalise queries and keys",
            claims=names,
        )


@rule
def value_norm(pair: Pair) -> Iterator[WorkItem]:
    if any(node.child("v_norm") for node in pair.tb.attention) and not any(
        node.child("v_norm") for node in pair.ta.attention
    ):
        weighted = any("weight" in child.shapes for n in pair.tb.attention if (child := n.child("v_norm")))
        yield item(
            ATTENTION,
            ATTENTION_FORWARD,
            "Norm on values",
            f"self_attn.v_norm normalises each head of values{'' if weighted else ', without a weight'}",
            claims=(r".*\.v_norm(\..*)?",),
        )


@rule
def scale(pair: Pair) -> Iterator[WorkItem]:
    a, b = pair.ta.scale, pair.tb.scale
    if a != b and not pair.new("kv_lora_rank"):
        words = {"head_size": "head_size**-0.5", "query_pre_attn_scalar": "query_pre_attn_scalar**-0.5"}
        title = "Attention scale from the head size" if b == "head_size" else f"Attention scale: {b}"
        value = f" = {pair.b.spec.attn_scale:.6g}" if pair.b.spec.attn_scale and not b[:1].isdigit() else ""
        why = f"scores are multiplied by {words.get(b, b)}{value}, {pair.a.label}'s by {words.get(a, a)}"
        yield item(ATTENTION, ATTENTION_INIT, title, why, reads=("attn_scale",))


@rule
def softcap(pair: Pair) -> Iterator[WorkItem]:
    if pair.new("attn_softcap"):
        why = f"attn_logit_softcapping {pair.b.spec.attn_softcap:g}: scores go through cap * tanh(scores / cap)"
        yield item(ATTENTION, ATTENTION_FORWARD, "Softcap on attention scores", why, reads=("attn_softcap",))
    elif pair.gone("attn_softcap"):
        why = f"{pair.b.label} has no attn_logit_softcapping; {pair.a.label} caps at {pair.a.spec.attn_softcap:g}"
        yield item(ATTENTION, ATTENTION_FORWARD, "Leave the softcap on attention scores out", why)


@rule
def sinks(pair: Pair) -> Iterator[WorkItem]:
    if pair.tb.sinks and not pair.ta.sinks:
        yield item(
            ATTENTION,
            (ATTENTION_INIT, ATTENTION_FORWARD),
            "Attention sinks",
            "self_attn.sinks: a learned score per head joins the softmax and is dropped after it, from position 0 on",
            claims=(r".*\.sinks",),
        )
    elif pair.ta.sinks and not pair.tb.sinks:
        why = f"{pair.b.label} has no self_attn.sinks"
        yield item(ATTENTION, ATTENTION_FORWARD, "Leave attention sinks out", why, claims=(r".*\.sinks",))


@rule
def biases(pair: Pair) -> Iterator[WorkItem]:
    a, b = pair.ta, pair.tb
    changed = [
        (name, now)
        for name, before, now in (
            ("q, k and v", a.query_bias, b.query_bias),
            ("output", a.output_bias, b.output_bias),
        )
        if before != now
    ]
    added = [name for name, now in changed if now]
    removed = [name for name, now in changed if not now]
    if added:
        yield item(
            ATTENTION,
            ATTENTION_INIT,
            f"Bias on the {' and '.join(added)} projections",
            f"the checkpoint has a bias for them, {pair.a.label}'s has none"
            + ("" if "attention_bias" in pair.b.raw else "; no config key says so"),
            reads=("attention_bias", "attention_output_bias"),
            claims=(r".*(self_attn|attn|attention)\.\w+\.bias",),
        )
    if removed:
        yield item(
            ATTENTION,
            ATTENTION_INIT,
            f"No bias on the {' and '.join(removed)} projections",
            f"{pair.b.label} has none there",
            claims=(r".*(self_attn|attn|attention)\.\w+\.bias",),
        )


@rule
def window_everywhere(pair: Pair) -> Iterator[WorkItem]:
    # A pattern of several kinds is the row "Heterogeneous layers".
    kinds = pair.tb.attention_kinds
    if kinds == ("sliding_attention",) and "sliding_attention" not in pair.ta.attention_kinds:
        yield item(
            ATTENTION,
            (ATTENTION_INIT, FROM_CONFIGS),
            "Sliding-window attention in every layer",
            f"sliding_window {pair.b.spec.sliding_window}: a token sees itself and the "
            f"{(pair.b.spec.sliding_window or 1) - 1} before it",
            reads=("sliding_window",),
        )
    elif kinds == ("full_attention",) and pair.ta.attention_kinds == ("sliding_attention",):
        why = f"{pair.b.label} has no sliding_window; {pair.a.label} sees {pair.a.spec.sliding_window} tokens"
        yield item(ATTENTION, (ATTENTION_INIT, FROM_CONFIGS), "Full attention in every layer", why)


@rule
def chunked(pair: Pair) -> Iterator[WorkItem]:
    if "chunked_attention" in pair.tb.attention_kinds and "chunked_attention" not in pair.ta.attention_kinds:
        yield item(
            ATTENTION,
            ATTENTION_FORWARD,
            "Chunked attention",
            f"attention_chunk_size {pair.b.spec.attention_chunk_size}: a token sees its own chunk, not a moving window",
            reads=("attention_chunk_size", "layer_types"),
        )


@rule
def keys_as_values(pair: Pair) -> Iterator[WorkItem]:
    if pair.new("k_eq_v", False):
        yield item(
            ATTENTION,
            (ATTENTION_INIT, ATTENTION_FORWARD),
            "Keys used as values in full-attention layers",
            "attention_k_eq_v: these layers have no v_proj; the key projection, before its norm and rotation, gives "
            "the values",
            reads=("k_eq_v",),
            claims=(r".*\.v_proj(\..*)?",),
        )


@rule
def shared_keys(pair: Pair) -> Iterator[WorkItem]:
    if pair.new("num_kv_shared_layers", 0):
        yield item(
            ATTENTION,
            (ATTENTION_INIT, ATTENTION_FORWARD),
            "Layers that reuse the keys and values of an earlier layer",
            f"the last {pair.b.spec.num_kv_shared_layers} layers (num_kv_shared_layers) have no K and V of their own",
            reads=("num_kv_shared_layers",),
        )


@rule
def fused_projection(pair: Pair) -> Iterator[WorkItem]:
    a, b = pair.ta.fused_qkv, pair.tb.fused_qkv
    if b is not None and a is None:
        yield item(
            ATTENTION,
            WEIGHT_MAP,
            "Fused q, k and v in the checkpoint",
            f"self_attn.{b} holds all three; declare q, k and v separately and split it while loading",
            claims=(rf".*\.{b}(\..*)?", r".*\.[qkv]_proj(\..*)?"),
        )
    elif a is not None and b is None:
        why = f"{pair.b.label}'s checkpoint has q, k and v apart; {pair.a.label}'s has {a}"
        yield item(
            ATTENTION, WEIGHT_MAP, "Separate q, k and v in the checkpoint", why, claims=(r".*\.[qkv]_proj(\..*)?",)
        )


@rule
def head_size(pair: Pair) -> Iterator[WorkItem]:
    def own(spec: object) -> bool:
        size, heads, width = (getattr(spec, name) for name in ("head_size", "num_heads", "hidden_size"))
        return bool(size and heads and size * heads != width)

    if own(pair.b.spec) and not own(pair.a.spec) and not pair.new("kv_lora_rank"):
        spec = pair.b.spec
        yield item(
            ATTENTION,
            FROM_CONFIGS,
            "Head size of its own",
            f"head_dim {spec.head_size} with {spec.num_heads} heads, not hidden_size {spec.hidden_size} over the heads",
            reads=("head_size",),
        )
