"""Rules of the rows "MLP/Activation" and "Normalization"."""

from __future__ import annotations

from collections.abc import Iterator

from pilotage.arch.diff.work import (
    LAYER_FORWARD,
    LAYER_INIT,
    MLP,
    MLP_FORWARD,
    MLP_INIT,
    MODEL_INIT,
    NORM,
    WEIGHT_MAP,
    Pair,
    WorkItem,
    item,
    rule,
)

# Names that Hugging Face has for one function.
_SAME_ACTIVATION = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"}
_ACTIVATION_NAMES = {"silu": "SiLU", "gelu_pytorch_tanh": "gelu-tanh", "gelu": "exact gelu", "relu2": "squared ReLU"}
_DENSE = r".*(mlp|feed_forward|block_sparse_moe)(\.(gate_proj|up_proj|down_proj|act_fn|activation_fn)(\..*)?)?"
_SPARSE = r".*(mlp|feed_forward|block_sparse_moe|moe)?\.?(experts|gate|router|act_fn)(\..*)?"


@rule
def activation(pair: Pair) -> Iterator[WorkItem]:
    a, b = (_SAME_ACTIVATION.get(name, name) for name in (pair.a.spec.activation, pair.b.spec.activation))
    if b is not None and a != b:
        key = pair.b.spec.fields["activation"].source_key
        name = _ACTIVATION_NAMES.get(b, b)
        yield item(
            MLP,
            MLP_FORWARD,
            f"{name[0].upper()}{name[1:]} MLP",
            f"{key} is {b}, not {a}; a slip sits under bf16 noise, so compare in fp32",
            reads=("activation",),
            claims=(r".*\.act(ivation)?(_fn)?",),
        )


@rule
def gate(pair: Pair) -> Iterator[WorkItem]:
    a, b = pair.ta.gated, pair.tb.gated
    if b is False and a is not False:
        why = f"{pair.b.label}'s MLP is two projections with the activation between, without a gate"
        yield item(MLP, (MLP_INIT, MLP_FORWARD), "MLP without a gate", why, claims=(r".*(mlp|feed_forward)\..*",))
    elif b and a is False:
        why = f"{pair.b.label}'s MLP multiplies the activated gate projection with the up projection"
        yield item(MLP, (MLP_INIT, MLP_FORWARD), "Gated MLP", why, claims=(r".*(mlp|feed_forward)\..*",))


@rule
def fused_gate(pair: Pair) -> Iterator[WorkItem]:
    a, b = pair.ta.fused_gate_up, pair.tb.fused_gate_up
    if b is not None and a is None:
        why = f"mlp.{b} holds gate and up; declare them separately and split it while loading"
        claims = (r".*mlp\.(gate|up|gate_up)_proj(\..*)?",)
        yield item(MLP, WEIGHT_MAP, "Fused gate and up in the checkpoint", why, claims=claims)


@rule
def mlp_bias(pair: Pair) -> Iterator[WorkItem]:
    if pair.tb.mlp_bias and not pair.ta.mlp_bias and pair.tb.gated is not None:
        why = f"the MLP's projections have biases; {pair.a.label}'s have none"
        claims = (r".*mlp\.\w+\.bias",)
        yield item(MLP, MLP_INIT, "Bias on the MLP projections", why, reads=("mlp_bias",), claims=claims)


@rule
def experts(pair: Pair) -> Iterator[WorkItem]:
    spec = pair.b.spec
    if pair.new("num_experts"):
        width = spec.moe_intermediate_size or spec.intermediate_size
        beside = " beside the dense MLP" if pair.tb.gated and len(set(spec.mlp_layer_types)) == 1 else ""
        yield item(
            MLP,
            (MLP_INIT, MLP_FORWARD),
            f"Mixture of experts: {spec.num_experts} experts, {spec.num_experts_per_token} for each token",
            f"{pair.b.spec.fields['num_experts'].source_key} {spec.num_experts}, each {width} wide{beside}; "
            f"{pair.a.label} has one MLP for all tokens",
            reads=("num_experts", "num_experts_per_token", "moe_intermediate_size", "mlp_layer_types"),
            claims=(_DENSE, _SPARSE, "MLP.forward"),
        )
        yield item(
            MLP,
            WEIGHT_MAP,
            "Expert weights",
            "the checkpoint may hold one tensor for each expert and projection, or all of them in one; transformers "
            "stacks them (experts.gate_up_proj, experts.down_proj): say which in the WeightMap",
            reads=("num_experts",),
        )
    elif pair.gone("num_experts"):
        why = f"{pair.b.label} has no experts: one gated MLP for all tokens"
        yield item(MLP, (MLP_INIT, MLP_FORWARD), "Dense MLP in place of experts", why, claims=(_DENSE, _SPARSE))


@rule
def router(pair: Pair) -> Iterator[WorkItem]:
    a, b = pair.ta.router, pair.tb.router
    if b is not None and a != b:
        where = "router" if any(node.child("router") for node in pair.tb.mlp) else "gate"
        yield item(
            MLP,
            MLP_FORWARD,
            f"Expert router: {b}",
            f"mlp.{where} scores the experts in fp32; near ties decide which experts run",
            reads=("norm_topk_prob", "routed_scaling", "num_experts_per_token"),
            claims=(r".*(gate|router)(\..*)?",),
        )


@rule
def shared_expert(pair: Pair) -> Iterator[WorkItem]:
    if pair.tb.shared_expert and not pair.ta.shared_expert:
        name = pair.tb.shared_expert
        yield item(
            MLP,
            (MLP_INIT, MLP_FORWARD),
            "Shared expert",
            f"mlp.{name} runs for every token and is added to the chosen experts",
            reads=("num_shared_experts",),
            claims=(rf".*{name}(_gate)?(\..*)?",),
        )


@rule
def expert_details(pair: Pair) -> Iterator[WorkItem]:
    if pair.tb.expert_bias and not pair.ta.expert_bias:
        why = "experts have gate_up_proj_bias and down_proj_bias"
        yield item(MLP, MLP_FORWARD, "Biases in the experts", why, claims=(r".*experts\.\w*bias",))
    if pair.tb.clamped and not pair.ta.clamped:
        alpha, limit = pair.b.fields.get("swiglu_alpha"), pair.b.fields.get("swiglu_limit")
        yield item(
            MLP,
            MLP_FORWARD,
            "Clamped SwiGLU in the experts",
            f"(up + 1) * gate * sigmoid({alpha} * gate), both clamped at {limit}; gate and up alternate in the fused "
            "tensor, so hidden_act does not describe it",
        )


@rule
def norms_per_layer(pair: Pair) -> Iterator[WorkItem]:
    a, b = pair.ta.norms, pair.tb.norms
    if not a or not b or a == b:
        return
    if len(b) != len(a):
        words = {1: "One norm", 2: "Two norms", 3: "Three norms", 4: "Four norms"}
        title = f"{words.get(len(b), f'{len(b)} norms')} a layer"
    else:
        title = "Norms at other places in the layer"
    yield item(
        NORM,
        (LAYER_INIT, LAYER_FORWARD),
        title,
        f"{', '.join(b)}; {pair.a.label} has {', '.join(a)}",
        claims=tuple(rf"(.*\.)?{name}(\..*)?" for name in {*a, *b}),
    )


@rule
def norm_weight(pair: Pair) -> Iterator[WorkItem]:
    a, b = pair.a.spec.norm_weight_offset, pair.b.spec.norm_weight_offset
    source = (pair.b.spec.fields["norm_weight_offset"].source_key or "").removeprefix("source: ")
    if a != b:
        title = f"Norm weights +{b:g}" if b else "Norm weights without an offset"
        why = f"{source}: the checkpoint stores the weight minus {b:g}" if b else f"{source}: {pair.a.label} adds {a:g}"
        yield item(NORM, (LAYER_INIT, MODEL_INIT), title, why, reads=("norm_weight_offset",), claims=("Norm.forward",))
    elif pair.ta.norm_cast != pair.tb.norm_cast and None not in (pair.ta.norm_cast, pair.tb.norm_cast):
        yield item(
            NORM,
            LAYER_INIT,
            f"Norm weight applied {pair.tb.norm_cast}",
            f"{pair.a.label} applies it {pair.ta.norm_cast}; the order rounds differently in bf16",
            claims=("Norm.forward",),
        )


@rule
def norm_kind(pair: Pair) -> Iterator[WorkItem]:
    a, b = pair.a.spec.norm_kind, pair.b.spec.norm_kind
    names = {"rms": "RMS norm", "layer": "LayerNorm (mean and variance)"}
    if b is not None and a is not None and a != b:
        why = f"{pair.b.label} normalises by {names[b]}, {pair.a.label} by {names[a]}"
        yield item(
            NORM,
            (LAYER_INIT, MODEL_INIT),
            names[b],
            why,
            reads=("norm_kind",),
            claims=("Norm.forward", r".*(norm|ln_\d|ln_f)\.bias", r"ln_f"),
        )
