"""The eight rows of the onboarding guide's checklist, each with a verdict and what says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pilotage.arch.diff import work
from pilotage.arch.diff.side import Side
from pilotage.arch.diff.traits import Traits, pattern
from pilotage.arch.diff.work import Pair, WorkItem
from pilotage.arch.fields import jsonable

VALUES_ONLY = "config.py: Config.from_configs (values only, nothing to write)"


@dataclass(frozen=True, kw_only=True)
class ChecklistRow:
    """One row.

    Attributes:
        row: the guide's name of the comparison.
        verdict: "same"; "differs"; or "absent" where the donor has something here that the new model does not.
        fields: the config keys, or facts of modules and source, that say so.
        touches: places of a model package that change, as in the row's work items; `VALUES_ONLY` where only sizes and
            constants differ; empty where nothing does.
        block: the building blocks of pilotage that serve it.
    """

    row: str
    verdict: str
    fields: tuple[str, ...]
    touches: str
    block: str

    def to_json(self) -> dict[str, Any]:
        return {
            "row": self.row,
            "verdict": self.verdict,
            "fields": list(self.fields),
            "touches": self.touches,
            "block": self.block,
        }


@dataclass(frozen=True)
class Aspect:
    """Something that a row compares.

    Attributes:
        label: what names it where no config key does.
        read: its value for one model.
        spec: the spec field whose source key names it, if any.
        each: the values are key names, and those that one model lacks are named themselves.
        feature: the model has something here only where the value is not empty; decides between differs and absent.
    """

    label: str
    read: Callable[[Side, Traits], Any]
    spec: str | None = None
    feature: bool = False
    each: bool = False


def _spec(name: str, *, feature: bool = False) -> Aspect:
    return Aspect(name, lambda side, _: jsonable(getattr(side.spec, name)), name, feature)


def _trait(label: str, name: str, spec: str | None = None, *, feature: bool = False) -> Aspect:
    return Aspect(label, lambda _, traits: getattr(traits, name), spec, feature)


def _several(kinds: Callable[[Side, Traits], tuple[Any, ...]]) -> Callable[[Side, Traits], Any]:
    """The kinds as a pattern where there are several, else nothing: a model of one kind has no pattern."""

    def read(side: Side, traits: Traits) -> str | None:
        found = kinds(side, traits)
        return pattern(found) if len(set(found)) > 1 else None

    return read


def _key(name: str) -> Callable[[Side, Traits], Any]:
    """Under which key a field stands; None where it stands nowhere."""
    return lambda side, _: side.spec.fields[name].source_key if side.spec.fields[name].stated else None


def _other_keys(side: Side, _: Traits) -> tuple[str, ...]:
    return tuple(sorted(side.spec.unread))


@dataclass(frozen=True)
class _Row:
    name: str
    block: str
    aspects: tuple[Aspect, ...]


_TABLE = (
    _Row(
        work.ATTENTION,
        "NF.qkv_proj, NF.flash_attention, NF.segmented_attention, NF.attention_decode, NF.o_proj",
        (
            _spec("num_heads"),
            _spec("num_kv_heads"),
            _spec("head_size"),
            _trait("layer_types", "attention_kinds", "layer_types", feature=True),
            _trait("layer_types", "recurrent_kinds", "layer_types"),
            _spec("sliding_window"),
            _spec("attention_chunk_size"),
            _trait("attention scale", "scale", "attn_scale"),
            _spec("attn_softcap"),
            _trait("q_norm, k_norm", "qk_norm", "qk_norm"),
            _trait("sinks (modules)", "sinks"),
            _trait("attention_bias", "query_bias", "attention_bias"),
            _trait("attention_bias", "output_bias", "attention_output_bias"),
            _trait("fused projection (modules)", "fused_qkv"),
            *(_spec(name) for name in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")),
            *(_spec(name) for name in ("v_head_dim", "k_eq_v", "num_kv_shared_layers")),
        ),
    ),
    _Row(
        work.LAYERS,
        "KVSpec and LayerSpec (one for each layer, with its own window and sizes)",
        (
            Aspect("layer_types", _several(lambda side, _: side.spec.layer_types), "layer_types", True),
            Aspect("mlp_layer_types", _several(lambda side, _: side.spec.mlp_layer_types), "mlp_layer_types", True),
            Aspect(
                "per_layer_config",
                lambda side, _: (
                    pattern(str(v) for v in side.spec.per_layer_config.values()) if side.spec.per_layer_config else None
                ),
                "per_layer_config",
                True,
            ),
            Aspect("layers built differently (modules)", lambda _, t: len(t.layers) if len(t.layers) > 1 else None),
        ),
    ),
    _Row(
        work.POSITION,
        "NF.rope_frequencies, NF.rope_table, NF.rotary",
        (
            # By kind of layer where they differ; a model with one RoPE has it under whatever kind its layers are.
            Aspect("rope_parameters", lambda _, traits: _ropes(traits), "rope", True),
            _spec("nope_layers"),
            _trait("rotation", "interleaved", "rope_interleave"),
            _trait("position embedding (modules)", "positions", feature=True),
        ),
    ),
    _Row(
        work.MLP,
        "NF.mlp (gate, up and down in one; silu, gelu, gelu_tanh)",
        (
            _spec("activation"),
            _spec("intermediate_size"),
            _trait("gate_proj (modules)", "gated"),
            _trait("fused gate_up_proj (modules)", "fused_gate_up"),
            _trait("mlp_bias", "mlp_bias", "mlp_bias"),
            *(_spec(name) for name in ("num_experts", "num_experts_per_token", "moe_intermediate_size")),
            _spec("num_shared_experts"),
            _trait("router (source)", "router"),
            _trait("experts' bias (modules)", "expert_bias"),
            _trait("swiglu_limit", "clamped"),
        ),
    ),
    _Row(
        work.NORM,
        "NF.rms_norm (unit_offset for weights stored minus one), pilotage.nn.RMSNorm",
        (
            _spec("norm_eps"),
            _spec("norm_kind"),
            _spec("norm_weight_offset"),
            _trait("norms in a layer (modules)", "norms"),
            _trait("q_norm, k_norm", "qk_norm", "qk_norm"),
            _trait("where the weight is applied (source)", "norm_cast"),
        ),
    ),
    _Row(
        work.CONFIG,
        "pilotage.arch.spec.ArchSpec, pilotage.models.common.reading.read",
        (
            Aspect("model_type of a wrapper", lambda side, _: side.spec.wrapper_type),
            Aspect("activation's key", _key("activation"), "activation"),
            Aspect("norm epsilon's key", _key("norm_eps"), "norm_eps"),
            Aspect("experts' key", _key("num_experts"), "num_experts"),
            Aspect("rope_parameters by kind of layer", lambda side, traits: len(_ropes(traits)) > 1, "rope"),
            Aspect("other keys", _other_keys, each=True),
        ),
    ),
    _Row(
        work.EMBEDDING,
        "pilotage.nn.VocabDimShardedEmbedding (scale), pilotage.nn.LMHead, Tie in the WeightMap",
        (
            _spec("tie_word_embeddings"),
            _spec("vocab_size"),
            _spec("embedding_scale"),
            _spec("per_layer_input_size"),
            _trait("lm_head bias (modules)", "head_bias"),
        ),
    ),
    _Row(
        work.SPECIAL,
        "NF.softcap on logits; encoders, drafts and quantised weights need code of their own",
        (
            _spec("logit_softcap", feature=True),
            Aspect(
                "logit_multiplier", lambda side, _: _unless(side.spec.logit_multiplier, 1.0), "logit_multiplier", True
            ),
            Aspect(
                "residual_multiplier",
                lambda side, _: _unless(side.spec.residual_multiplier, 1.0),
                "residual_multiplier",
                True,
            ),
            Aspect("modalities", lambda side, _: list(side.spec.modalities), "modalities", True),
            _spec("num_experts", feature=True),
            _spec("quantization", feature=True),
            Aspect("num_mtp_layers", lambda side, _: _unless(side.spec.num_mtp_layers, 0), "num_mtp_layers", True),
            _trait("parallel attention and MLP (source)", "parallel", feature=True),
            Aspect(
                "use_bidirectional_attention",
                lambda side, _: side.fields.get("use_bidirectional_attention") or None,
                None,
                True,
            ),
        ),
    ),
)


def _unless(value: Any, nothing: Any) -> Any:
    return None if value == nothing else value


def _ropes(traits: Traits) -> dict[str, Any]:
    ropes = {kind: rope.to_json() for kind, rope in traits.ropes.items()}
    values = list(ropes.values())
    return ropes if any(value != values[0] for value in values) else {"all layers": values[0]} if values else {}


def checklist(pair: Pair, items: list[WorkItem]) -> list[ChecklistRow]:
    """Judge every row; `items` are the work items of the pair, which say what a row touches."""
    return [_judge(row, pair, items) for row in _TABLE]


def _judge(row: _Row, pair: Pair, every: list[WorkItem]) -> ChecklistRow:
    items = [found for found in every if found.row == row.name]
    differing = [aspect for aspect in row.aspects if aspect.read(pair.a, pair.ta) != aspect.read(pair.b, pair.tb)]
    if not differing and not items:
        return ChecklistRow(row=row.name, verdict="same", fields=(), touches="", block=row.block)
    features = [aspect for aspect in row.aspects if aspect.feature]
    had, has = (
        any(aspect.read(side, traits) for aspect in features) for side, traits in ((pair.a, pair.ta), (pair.b, pair.tb))
    )
    verdict = "absent" if features and had and not has else "differs"
    named = [name for aspect in differing for name in _names(aspect, pair)] or [found.title for found in items]
    # What another row's work covers (QK-norm is attention's) is not values only.
    covered = {aspect.spec for aspect in differing if aspect.spec}
    covered &= {name for name in covered if row.name != work.CONFIG}  # there only the place of the key differs
    involved = items or [found for found in every if covered & set(found.reads)]
    places = [place for found in involved for place in found.touches.split("; ")]
    touches = "; ".join(dict.fromkeys(places)) or VALUES_ONLY
    return ChecklistRow(
        row=row.name, verdict=verdict, fields=tuple(dict.fromkeys(named)), touches=touches, block=row.block
    )


def _names(aspect: Aspect, pair: Pair) -> list[str]:
    """The config key that says so: the new model's, or the donor's where only that has one."""
    if aspect.each:
        a, b = set(aspect.read(pair.a, pair.ta)), set(aspect.read(pair.b, pair.tb))
        return sorted(a ^ b)
    if aspect.spec is None:
        return [aspect.label]
    for side in (pair.b, pair.a):
        found = side.spec.fields[aspect.spec]
        if found.source_key and (found.stated or found.value is not None):
            key = found.source_key.removeprefix("derived: ").removeprefix("text_config.")
            return [f"{aspect.label} (source)" if key.startswith("source: ") else key]
    return [aspect.label]
