"""`pilotage kernels search`: what there is for a description in words, in the order of the onboarding guide.

First what already runs behind an operator, then kernels of libraries that only have to be wrapped, last: write one.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pilotage.core.errors import BadInput
from pilotage.core.targets import TARGETS
from pilotage.functional import registry
from pilotage.functional.domain import Domain
from pilotage.functional.registry import DEFINITION
from pilotage.kernels import library
from pilotage.kernels.library import LibraryKernel

# What is looked for -> words that mean it, in queries, names and docstrings.
OPERATIONS = {
    "attention": ("attention", "attn", "sdpa"),
    "norm": ("norm", "rmsnorm", "layernorm", "rms_norm"),
    "rotary": ("rotary", "rope"),
    "mlp": ("mlp", "swiglu", "ffn", "feed forward", "gated"),
    "qkv projection": ("qkv",),
    "output projection": ("output projection", "output_projection", "o_proj"),
    "experts": ("experts", "expert", "moe", "mixture"),
    "router": ("router", "routing"),
    "matmul": ("matmul", "linear", "gemm", "matrix multiplication"),
    "embedding": ("embedding",),
    "sampling": ("sampling", "sample", "argmax"),
    "cumsum": ("cumsum", "cumulative"),
    "kv write": ("write_kv", "kv write", "cache write", "write kv"),
    "top k": ("topk", "top_k", "top-k"),
    "transpose": ("transpose",),
    "softcap": ("softcap", "soft cap", "logit cap"),
}
PHASES = {
    "prefill": ("prefill", "cte", "context encoding", "packed"),
    "decode": ("decode", "tkg", "token generation"),
}
FEATURES = {
    "causal": ("causal",),
    "GQA": ("gqa", "grouped query", "group query", "grouped-query", "key head", "n a multiple of k"),
    "window": ("window", "sliding", "swa"),
    "sinks": ("sink", "sinks"),
    "softcap": ("softcap", "soft cap", "logit cap"),
    "paged": ("paged", "block table", "block_table", "block kv"),
    "prefix": ("prefix", "k_prior"),
    "packed": ("packing", "packed", "token_to_req"),
    "bias": ("bias",),
    "quantised": ("quant", "quantised", "quantized", "fp8", "mxfp4", "mx"),
    "backward": ("backward", "bwd"),
    "fused": ("fused",),
}
UNASKED = ("quantised", "backward")  # specialisations that nobody wants who did not ask for them
SIZES = {  # word in a query -> (letter of core/shapes.md, names in kernel libraries)
    "head": ("H", ("d", "d_head", "head_dim", "head_size", "dim_head", "d_qk")),
    "hidden": ("D", ("H", "hidden", "hidden_size", "hidden_dim", "hidden_size_in")),
    "width": ("D", ("H", "hidden", "hidden_size", "hidden_dim")),
    "sequence": ("S", ("S", "seqlen", "seqlen_q", "seq_len", "s_prior", "seqlen_k", "seqlen_k_total")),
    "batch": ("B", ("B", "bs", "batch", "batch_size")),
    "experts": ("E", ("E", "num_experts", "expert_num")),
}
_SAME = {"heads": "head", "dim": "head", "seq": "sequence", "seqlen": "sequence", "length": "sequence"}
_OPERATOR_WORDS = {
    "flash_attention": "attention prefill packed causal gqa window sinks softcap",
    "segmented_attention": "attention prefill packed causal gqa window sinks softcap paged prefix",
    "attention_decode": "attention decode causal gqa window sinks softcap paged",
    "write_kv": "kv write paged",
    "o_proj": "output projection matmul",
    "linear": "matmul bias",
    "experts": "experts moe mlp fused",
    "mlp": "mlp gated fused bias",
    "softcap": "softcap",
    "sample_tokens": "sampling",
}


@dataclass(frozen=True, kw_only=True)
class Query:
    """A description, read."""

    operations: tuple[str, ...]
    phase: str | None
    features: tuple[str, ...]
    sizes: Mapping[str, int]
    unread: tuple[str, ...]

    def __str__(self) -> str:
        parts = [*self.operations, *([self.phase] if self.phase else []), *self.features]
        parts += [f"{name} {size}" for name, size in self.sizes.items()]
        unread = f" (not understood: {', '.join(self.unread)})" if self.unread else ""
        return ", ".join(parts) + unread

    def to_json(self) -> dict[str, Any]:
        return {
            "operations": list(self.operations),
            "phase": self.phase,
            "features": list(self.features),
            "sizes": dict(self.sizes),
            "not_understood": list(self.unread),
        }


@dataclass(frozen=True, kw_only=True)
class Hit:
    """Something that may do.

    Attributes:
        step: 1 runs behind an operator, 2 has to be wrapped.
        fits: whether nothing is known against it.
        why: what speaks for it.
        against: what speaks against it, or what it lacks.
        lines: Python that puts it into a model.
    """

    step: int
    name: str
    where: str
    score: float
    fits: bool
    why: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    lines: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "name": self.name,
            "where": self.where,
            "score": self.score,
            "fits": self.fits,
            "why": list(self.why),
            "against": list(self.against),
            "lines": list(self.lines),
        }


def read(text: str) -> Query:
    """Read a description such as "attention prefill, causal, GQA, head 128".

    Raises:
        BadInput: no operation in it is known.
    """
    low = text.lower()
    sizes = {}
    for name, value in re.findall(r"([a-z_]+)[ =:]*(\d+)", low):
        name = _SAME.get(name, name)
        if name in SIZES:
            sizes[name] = int(value)
    operations = tuple(name for name, words in OPERATIONS.items() if _has(low, words))
    phase = next((name for name, words in PHASES.items() if _has(low, words)), None)
    features = tuple(name for name, words in FEATURES.items() if _has(low, words) and name not in operations)
    if "attention" in operations:  # its options are no operations of their own
        operations = tuple(name for name in operations if name != "softcap")
        features = tuple(name for name in FEATURES if _has(low, FEATURES[name]))
    if not operations:
        raise BadInput(f"no operation is named in {text!r}", where="search", do=f"say which: {', '.join(OPERATIONS)}")
    meant = {word for table in (OPERATIONS, PHASES, FEATURES) for words in table.values() for word in words}
    known = {part for word in meant for part in re.split(r"[ _-]", word)} | set(SIZES) | set(_SAME)
    unread = tuple(word for word in re.findall(r"[a-z_]{3,}", low) if word not in known and word not in meant)
    return Query(operations=operations, phase=phase, features=features, sizes=sizes, unread=unread)


def search(text: str, *, target: str = "neuron", paths: Sequence[Path] = ()) -> tuple[Query, list[Hit]]:
    """Look through the registry, the installed kernel libraries and the given folders.

    Args:
        text: what is needed, in words.
        target: what it has to run on.
        paths: folders or files of kernel libraries.

    Returns:
        The description as it was read, and what was found: step 1 before step 2, what fits before what does not.

    Raises:
        BadInput: a description without an operation, an unknown target, a path that is not there.
    """
    if target not in TARGETS:
        raise BadInput(f"no target named {target!r}", where="--target", do=f"use one of {', '.join(TARGETS)}")
    query = read(text)
    language = TARGETS[target].language
    hits = _operators(query, target)
    for kernel in library.scan([*library.installed(), *paths]):
        if kernel.language == language and (hit := _judge(query, kernel)) is not None:
            hits.append(hit)
    return query, sorted(hits, key=lambda hit: (hit.step, not hit.fits, -hit.score, hit.name))


def _has(text: str, words: Sequence[str]) -> bool:
    return any(
        re.search(rf"(?<![a-z0-9]){re.escape(word)}(?![a-z0-9])", text.replace("_", " "))
        for word in {word.replace("_", " ") for word in words}
    )


def _scored(query: Query, name: str, text: str) -> tuple[float, list[str], list[str]] | None:
    """Weigh a name and what is written about it; None if it is another operation."""
    name, text = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower(), text.lower()
    named = [one for one in query.operations if _has(name, OPERATIONS[one])]
    told = [one for one in query.operations if one not in named and _has(text, OPERATIONS[one])]
    if not named and len(told) < len(query.operations):
        return None
    score = 5.0 * len(named) + 1.0 * len(told)
    why, against = [*named, *told], []
    others = [one for one in OPERATIONS if one not in query.operations and _has(name, OPERATIONS[one])]
    score -= 2.0 * len(others)
    against += [f"also {one}" for one in others]
    if query.phase is not None:
        other = next(one for one in PHASES if one != query.phase)
        if _has(name, PHASES[query.phase]) or (not _has(name, PHASES[other]) and _has(text, PHASES[query.phase])):
            score += 3
            why.append(query.phase)
        elif _has(name, PHASES[other]) or (_has(text, PHASES[other]) and not _has(text, PHASES[query.phase])):
            score -= 4
            against.append(f"made for {other}")
    for feature in query.features:
        if _has(name, FEATURES[feature]) or _has(text, FEATURES[feature]):
            score += 1
            why.append(feature)
        else:
            against.append(f"says nothing of {feature}")
    for feature in UNASKED:
        if feature not in query.features and _has(name, FEATURES[feature]):
            score -= 4
            against.append(feature)
    return score, why, against


def _operators(query: Query, target: str) -> list[Hit]:
    out = []
    for operator in registry.operators():
        found = registry.implementations(operator)
        definition = next(one for one in found if one.name == DEFINITION)
        text = f"{_OPERATOR_WORDS.get(operator, '')} {' '.join(registry.signature_of(operator).parameters)}"
        scored = _scored(query, operator, f"{text} {inspect.getdoc(definition.function) or ''}")
        if scored is None or scored[0] < 4:
            continue
        score, why, against = scored
        ours = [one for one in found if isinstance(one.domain, Domain) and target in one.domain.targets]
        for one in ours:
            assert isinstance(one.domain, Domain)
            wrong = []
            for word, size in query.sizes.items():
                limit = one.domain.limits.get(SIZES[word][0])
                if limit is not None and not limit.allows(size):
                    wrong.append(f"{word} {size} is not {limit}")
            lines = (f"NF.{operator}(...)  # {one.name} ({one.language}) runs where its domain accepts",)
            out.append(
                Hit(
                    step=1,
                    name=f"NF.{operator}: {one.name}",
                    where=f"priority {one.priority}; {'; '.join(one.domain.describe()) or 'no limits'}",
                    score=score,
                    fits=not wrong and not _blocking(against),
                    why=tuple(why),
                    against=(*against, *wrong),
                    lines=lines,
                )
            )
        if not ours:
            out.append(
                Hit(
                    step=1,
                    name=f"NF.{operator}: plain torch only",
                    where=f"nothing made for {target} is registered",
                    score=score - 2,
                    fits=False,
                    why=tuple(why),
                    against=(*against, f"no implementation for {target}"),
                    lines=(f"NF.{operator}(...)  # correct; its definition is compiled with the rest of the graph",),
                )
            )
    return out


def _blocking(against: Sequence[str]) -> bool:
    return any(one.startswith(("made for", "also")) or one in UNASKED for one in against)


def _judge(query: Query, kernel: LibraryKernel) -> Hit | None:
    scored = _scored(query, f"{kernel.name} {kernel.module}", f"{' '.join(kernel.parameters)} {kernel.text}")
    if scored is None:
        return None
    score, why, against = scored
    wrong = []
    for word, size in query.sizes.items():
        for bound in kernel.bounds:
            if bound.name in SIZES[word][1]:
                if bound.allows(size):
                    why.append(f"{word} {size} ({bound}, line {bound.line})")
                else:
                    wrong.append(f"{word} {size} is not {bound} (line {bound.line})")
    made = kernel.name if kernel.decorated else f"nki.jit({kernel.name})"
    fallback = "my_fallback"
    lines = [f"from {kernel.module} import {kernel.name}", "from pilotage.utils.nki_utils import wrap_nki"]
    if kernel.fallback is not None:
        module, fallback = kernel.fallback.split(":")
        lines.append(f"from {module} import {fallback}  # annotate it if it is not")
    lines += [
        f"wrapped = wrap_nki({made}, fallback={fallback})",
        f"wrapped[2]({', '.join(kernel.required)})",
    ]
    return Hit(
        step=2,
        name=kernel.name,
        where=f"{kernel.file}:{kernel.line}",
        score=score,
        fits=not wrong and not _blocking(against),
        why=tuple(dict.fromkeys(why)),
        against=(*against, *wrong),
        lines=tuple(lines),
    )
