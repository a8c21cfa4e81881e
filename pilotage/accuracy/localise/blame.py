"""From sites at fault to the modules that a person would blame: pure functions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pilotage.accuracy.localise.score import LARGEST, Score
from pilotage.core.sites import Site, parse

# Inner tap -> the part of its module that computes it, "" for the module itself.
_PART = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}
_ROPE = ("q_rope", "k_rope")
KV = "kv"
# Scores within this factor are ranked by the order of the model.
ALIKE = 30.0
WHAT = {
    "q": "the queries' projection, its weight or bias",
    "k": "the keys' projection, its weight or bias",
    "v": "the values' projection, its weight or bias",
    "q_rope": "rotary positions of the queries: base, scaling, layout, or the positions themselves",
    "k_rope": "rotary positions of the keys: base, scaling, layout, or the positions themselves",
    "heads": "attention itself: mask, window, scale, softcap, sinks, grouping of heads, or what it reads of the cache",
    KV: "the KV cache: what was written is not what is read back",
    "mid": "the residual sum after attention",
    "router": "the router's product, or its dtype",
    "experts": "choice, weights or computation of the experts",
}
# Field of an ArchSpec -> part of a decoder layer that it concerns, or a module of the model.
FIELDS = {
    "norm_eps": "input_layernorm",
    "norm_kind": "input_layernorm",
    "norm_weight_offset": "input_layernorm",
    "qk_norm": "self_attn.q_norm",
    "rope": "self_attn",
    "nope_layers": "self_attn",
    "rope_interleave": "self_attn",
    "attention_bias": "self_attn.q_proj",
    "attention_output_bias": "self_attn.o_proj",
    "num_heads": "self_attn",
    "num_kv_heads": "self_attn",
    "head_size": "self_attn",
    "attn_scale": "self_attn",
    "attn_softcap": "self_attn",
    "layer_types": "self_attn",
    "sliding_window": "self_attn",
    "attention_chunk_size": "self_attn",
    "activation": "mlp",
    "intermediate_size": "mlp",
    "mlp_bias": "mlp",
    "mlp_layer_types": "mlp",
    "num_experts": "mlp.experts",
    "num_experts_per_token": "mlp.experts",
    "moe_intermediate_size": "mlp.experts",
    "num_shared_experts": "mlp",
    "norm_topk_prob": "mlp.experts",
    "routed_scaling": "mlp.experts",
    "swiglu_alpha": "mlp.experts",
    "swiglu_limit": "mlp.experts",
    "embedding_scale": "model.embed_tokens",
    "vocab_size": "model.embed_tokens",
    "logit_softcap": "lm_head",
    "logit_multiplier": "lm_head",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A site at fault in one arm.

    Attributes:
        key: the site, in its one-string form; `<attention>.kv` for the cache.
        arm: dtype.
        score: how far off it is.
        worst: the worst row: {"request", "position", "phase"}.
        first: lowest position of a wrong row, None where no single row is.
        wrong: share of wrong rows, by phase.
    """

    key: str
    arm: str
    score: Score
    worst: Mapping[str, Any]
    first: int | None
    wrong: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known besides the measured sites.

    Attributes:
        reference_sites: sites of the reference, in the order of its forward.
        target_modules: names of the target's modules; empty where they cannot be listed.
        routers: `<block>.router` -> Hugging Face name of the module that computes it.
        parameters: names of parameters whose values differ from the reference's.
        fields: ArchSpec fields that differ, with both values.
        constants: module -> what its declared constants or its answer to a small input prove.
    """

    reference_sites: Sequence[str]
    target_modules: frozenset[str] = frozenset()
    routers: Mapping[str, str] = field(default_factory=dict)
    parameters: Sequence[str] = ()
    fields: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    constants: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """A module at fault.

    Attributes:
        module: its Hugging Face name.
        site: "output", or the inner site that shows it.
        key: the site in its one-string form.
        score: largest statistic over its bound; above 1 is a fault.
        what: what to look at, in words.
        kind: the site without its layer; culprits of one kind are one fault in several layers.
        layers: all layers in which this kind fails.
        also: other names by which one may know the place.
        evidence: JSON values.
    """

    module: str
    site: str
    key: str
    score: float
    what: str
    kind: str
    layers: Sequence[int]
    also: Sequence[str]
    evidence: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "site": self.site,
            "score": self.score,
            "what": self.what,
            "layers": list(self.layers),
            "also": list(self.also),
            "key": self.key,
            "evidence": dict(self.evidence),
        }


def kind(key: str) -> str:
    """Return a site's name with `*` for the layer."""
    return re.sub(r"(?<=layers\.)\d+", "*", key)


def family(name: str) -> str:
    """Name the kinds of site that are one fault when they fail together: q and k rotated alike, all norms."""
    owner, _, last = name.rpartition(".")
    if last in _PART:
        return f"{owner}.qkv"
    if last in _ROPE:
        return f"{owner}.rope"
    return "norms" if last.endswith("norm") else name


def layer(key: str) -> int | None:
    found = re.search(r"layers\.(\d+)", key)
    return int(found[1]) if found else None


def blamed(key: str, facts: Facts) -> tuple[str, str, list[str]]:
    """Return module, site and other names for a site at fault."""
    site = Site(key.removesuffix(f".{KV}"), KV) if key.endswith(f".{KV}") else parse(key)
    also: list[str] = []
    if key == "logits":
        return "lm_head", "output", ["logits"]
    missing = _missing(key, facts)
    if missing:
        return missing[0], "output", [site.module, *missing[1:]]
    if site.site in _PART:
        module = f"{site.module}.{_PART[site.site]}"
        also = [site.module]
    elif site.site == "router":
        module = facts.routers.get(key, site.module)
        also = [key, site.module]
    elif site.site == "experts":
        module, also = key, [site.module]
    elif site.site == "output" and site.module.endswith(".self_attn"):
        # Heads are a site of their own; what is left of attention is its output projection.
        module, also = f"{site.module}.o_proj", [site.module]
    else:
        module = site.module
        if site.site in _ROPE:
            also = ["model.rotary_emb"]
    return module, site.site, also


def _missing(key: str, facts: Facts) -> list[str]:
    """Name modules that the reference has right before `key` and the target has not."""
    if not facts.target_modules or key not in facts.reference_sites:
        return []
    found: list[str] = []
    for name in reversed(facts.reference_sites[: facts.reference_sites.index(key)]):
        site = parse(name)
        if name in facts.target_modules or site.site != "output":
            break
        if name not in facts.routers and not name.endswith(".mlp.experts"):
            found.append(name)
    # The outermost of them: a whole layer rather than its last norm.
    return sorted(found, key=lambda name: (name.count("."), name))


def rank(findings: Iterable[Finding], facts: Facts) -> list[Culprit]:
    """Make culprits of findings: the worst kind of site first, its layers in order."""
    by_key: dict[str, list[Finding]] = {}
    for finding in findings:
        by_key.setdefault(finding.key, []).append(finding)
    culprits = [_culprit(key, found, by_key, facts) for key, found in by_key.items()]
    culprits += _proven(culprits, facts)
    best: dict[str, float] = {}
    for culprit in culprits:
        for name in {culprit.kind, family(culprit.kind)}:
            best[name] = max(best.get(name, 0.0), culprit.score)
    for name in list(best):
        if name.endswith(f".{KV}"):
            # A wrong cache makes attention wrong, never the other way round.
            heads = name.removesuffix(KV) + "heads"
            best[name] = max(best[name], best.get(heads, 0.0) * 1.01)

    worst = max(best.values(), default=0.0)
    place = {site: index for index, site in enumerate(facts.reference_sites)}
    places: dict[str, float] = {}
    for culprit in culprits:
        # What is read from the cache comes before the attention that reads it.
        heads = culprit.key.removesuffix(KV) + "heads" if culprit.key.endswith(f".{KV}") else culprit.key
        at = place.get(heads, len(place)) - (heads != culprit.key) / 2
        together = family(culprit.kind)
        places[together] = min(places.get(together, at), at)

    for name in places:
        if name.endswith(f".{KV}"):
            places[name] = min(places[name], places.get(name.removesuffix(KV) + "heads", math.inf) - 0.5)

    def order(culprit: Culprit) -> tuple[Any, ...]:
        number = layer(culprit.key)
        together = family(culprit.kind)
        # Of what is about equally wrong the first in the model is blamed first: a norm that moved, not what it fed.
        by_place = best[together] * ALIKE >= worst
        first = (0.0, places[together]) if by_place else (1.0, -best[together])
        return *first, together, -best[culprit.kind], culprit.kind, -1 if number is None else number

    return sorted(culprits, key=order)


def _culprit(key: str, found: Sequence[Finding], by_key: Mapping[str, Any], facts: Facts) -> Culprit:
    worst = max(found, key=lambda finding: finding.score.value)
    module, site, also = blamed(key, facts)
    layers = sorted(number for other in by_key if kind(other) == kind(key) and (number := layer(other)) is not None)
    evidence: dict[str, Any] = {
        "arm": worst.arm,
        **worst.score.to_json(),
        "worst_row": dict(worst.worst),
        "first_wrong_position": worst.first,
        "wrong_rows_by_phase": dict(worst.wrong),
        "arms": {finding.arm: min(finding.score.value, LARGEST) for finding in found},
    }
    parameters = [name for name in facts.parameters if name.startswith(f"{module}.")]
    if parameters:
        evidence["parameters"] = parameters
    fields = {name: values for name, values in facts.fields.items() if _concerns(name, key, module)}
    if fields:
        evidence["config"] = fields
    if site in _ROPE:
        parameters = []
    constants = {
        name: text for name, text in facts.constants.items() if name == module or (name in also and site in _ROPE)
    }
    if constants:
        evidence["constants"] = constants
    what = WHAT.get(site, "")
    if module != parse(key).module and module in _missing(key, facts):
        what = "the reference has it and the target has not"
    return Culprit(
        module=module,
        site=site,
        key=key,
        score=min(worst.score.value, LARGEST),
        what=what,
        kind=kind(key),
        layers=layers,
        also=also,
        evidence=evidence,
    )


def _concerns(name: str, key: str, module: str) -> bool:
    part = FIELDS.get(name, "")
    if part.endswith("norm"):
        return module.endswith("norm")
    if part == "self_attn" and name == "rope":
        return parse(key).site in _ROPE
    if part == "self_attn":
        return parse(key).site in ("heads", *_ROPE)
    return bool(part) and (module == part or module.endswith(f".{part}") or part in module)


def _proven(measured: Sequence[Culprit], facts: Facts) -> list[Culprit]:
    """Make culprits of what is proven and no number shows: a constant, a config field, a weight that no token uses."""
    shown = {culprit.module for culprit in measured} | {name for culprit in measured for name in culprit.also}
    found: list[Culprit] = []

    def add(module: str, what: str, **evidence: Any) -> None:
        if module not in shown:
            shown.add(module)
            number = layer(module)
            found.append(
                Culprit(
                    module=module,
                    site="output",
                    key=module,
                    score=1.0,
                    what=what,
                    kind=kind(module),
                    layers=[] if number is None else [number],
                    also=[],
                    evidence=evidence,
                )
            )

    for module, text in facts.constants.items():
        add(module, text, constants={module: text})
    for name in facts.parameters:
        owner = name.rpartition(".")[0]
        if not any(owner == s or owner.startswith(f"{s}.") for s in shown):
            add(owner, "its weights are not the reference's, though no token of this run shows it", parameters=[name])
    covered = {name for culprit in measured for name in culprit.evidence.get("config", {})}
    for name, values in facts.fields.items():
        if name in covered or (name in ("norm_eps",) and any(c.module.endswith("norm") for c in found)):
            continue
        part = FIELDS.get(name, "")
        module = part if not part or part.startswith(("model.", "lm_head")) else f"model.layers.0.{part}"
        add(
            module or "model",
            f"the config says so: {name} is {values['target']}, the reference's {values['reference']}",
            config={name: values},
        )
    return found
