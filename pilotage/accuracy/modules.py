"""Module checks: attention, MLP, norms, RoPE, embedding and decoder layers against Hugging Face, with the real weights.

Every module gets the input that it has in the fp32 reference, rounded to the dtype under test, so that errors do not
travel from one module to the next: the one that fails is the one at fault, or contains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from pilotage.accuracy import gates, metrics
from pilotage.accuracy.arms import hf
from pilotage.accuracy.arms.module import CONTEXT, HFModules, Job, OurModules
from pilotage.accuracy.arms.ranked import answers
from pilotage.accuracy.arms.routing import Routing
from pilotage.accuracy.comparison import finite
from pilotage.core import sites
from pilotage.core.nouns import Status, Verdict, worst
from pilotage.probe.hf import is_router

# Norms are run a second time on inputs this many times larger than the square root of their epsilon: under ordinary
# activations no number shows a wrong epsilon.
SMALL = 3.0
# Positions at which RoPE is compared besides those of the stream, up to the model's longest.
FAR = (1000, 5000, 20000, 100000)
ROW_PARALLEL = ("o_proj", "down_proj")
# Kinds that may hold experts.
ROUTED = ("mlp", "decoder layer")
# Rows of the embedding that are compared.
MOST_ROWS = 8192
# A twin's window is 16.
TWIN_TOKENS = 70


@dataclass(frozen=True, kw_only=True)
class ModulePlan:
    """Which modules are checked, and how.

    Attributes:
        patterns: module names relative to the decoder (`layers.*.mlp`, `layers.[0-3].self_attn.q_proj`, `norm`); None
            for the first layer of each kind, the last layer and what is outside of layers, without single projections.
        weights: "real", or "perturbed": a tiny twin of the architecture whose weights hide nothing.
        ranks: tensor-parallel ranks, each a process of its own when there are several.
    """

    patterns: Sequence[str] | None = None
    weights: Literal["real", "perturbed"] = "real"
    ranks: int = 1


def layer_types(hf_model: Any, layers: int) -> list[str]:
    """Return the kind of attention of each layer, "full_attention" where the config has no pattern."""
    config = hf_model.config.get_text_config()
    return list(getattr(config, "layer_types", None) or ["full_attention"] * layers)


def chosen(types: Sequence[str], shared: int = 0) -> list[int]:
    """Choose the first layer of each kind, and the last layer; of the `shared` last ones the first of each kind too."""
    own = len(types) - shared
    first = {types.index(kind) for kind in types} | {types.index(kind, own) for kind in types[own:]}
    return sorted({*first, len(types) - 1})


def names(decoder: Any, layers: Sequence[int]) -> list[tuple[str, str]]:
    """List (module name relative to the decoder, kind) of everything that is checked, in the order of the model."""
    found = [(name, "embedding") for name, _ in decoder.named_children() if name.startswith("embed_tokens")]
    for index in layers:
        layer = decoder.layers[index]
        # A norm without a weight is arithmetic of its block, and no module that a port must have.
        inner = [
            name
            for name, module in layer.named_modules()
            if name.split(".")[-1].endswith("norm") and getattr(module, "weight", None) is not None
        ]
        found += [(f"layers.{index}", "decoder layer"), (f"layers.{index}.self_attn", "attention")]
        found += [(f"layers.{index}.mlp", "mlp"), *((f"layers.{index}.{name}", "norm") for name in inner)]
        found += [(f"layers.{index}.{name}", "router") for name in routers(layer)]
    return [*found, ("norm", "norm")]


def routers(layer: Any) -> list[str]:
    """List what scores experts in a layer, relative to it."""
    return [
        name
        for name, _ in layer.named_modules()
        if name and is_router(name.rpartition(".")[2], layer.get_submodule(name.rpartition(".")[0]))
    ]


def linears(decoder: Any) -> list[tuple[str, str]]:
    """List (name, "linear") of every projection inside of the layers."""
    return [
        (f"layers.{index}.{name}", "linear")
        for index, layer in enumerate(decoder.layers)
        for name, module in layer.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]


def check(
    target: Path,
    reference: Path,
    fp32: Any,
    tokens: Sequence[int],
    *,
    dtypes: Sequence[str] = ("bfloat16", "float32"),
    rounded: torch.dtype | None = None,
    plan: ModulePlan | None = None,
) -> list[dict[str, Any]]:
    """Check the modules of a checkpoint's served model.

    Args:
        target: checkpoint that our model loads.
        reference: checkpoint that Hugging Face loads.
        fp32: the reference loaded in fp32 with sdpa attention.
        tokens: a stream longer than the sliding window.
        dtypes: to check.
        rounded: see `hf.load`.

    Returns:
        For each module and dtype {"module", "kind", "dtype", "verdict"}.
    """
    plan = plan or ModulePlan()
    decoder = fp32.get_decoder()
    types = layer_types(fp32, len(decoder.layers))
    wanted, ropes = listed(fp32, plan.patterns)
    expected = HFModules(fp32, tokens, [name for name, _ in wanted])
    results = []
    for dtype_name in dtypes:
        dtype = getattr(torch, dtype_name)
        if dtype is torch.float32:
            hf.set_attention(fp32, "eager")
            baseline = HFModules(fp32, tokens, [name for name, _ in wanted])
        else:
            other = as_on_ranks(hf.load(reference, dtype, rounded_to=rounded), plan.ranks)
            baseline = HFModules(other, tokens, [name for name, _ in wanted])
        jobs = [*_jobs(wanted, types, expected, dtype), *_rope_jobs(ropes, types, fp32, expected)]
        ours = answers(target, dtype, len(tokens), jobs, ranks=plan.ranks)
        for job, found in zip(jobs, ours, strict=True):
            if job.kind == "rope":
                results.append(_entry(job.label, job.kind, dtype_name, _rope(job, found, fp32, expected, baseline)))
                continue
            values, decode = _compared(job, found, expected, baseline, fp32)
            verdicts = _judge(job, dtype, *values)
            if dtype is not torch.float32 and found is not None and found.shape == values[2].shape:
                verdicts += _to_the_bit(job, found, values[2], baseline)
            results.append(_entry(job.label, job.kind, dtype_name, verdicts, **decode))
        hf.set_attention(fp32, "sdpa")
    return results


def as_on_ranks(model: Any, ranks: int) -> Any:
    """Let a Hugging Face model sum its row-parallel projections as ranks do: parts rounded, then added.

    In a half precision that alone makes the error of a projection up to 1.4 times as large.
    """

    def split(linear: torch.nn.Linear) -> Any:
        def forward(x: Tensor) -> Tensor:
            weights, inputs = linear.weight.chunk(ranks, dim=1), x.chunk(ranks, dim=-1)
            parts = [torch.nn.functional.linear(a, w) for a, w in zip(inputs, weights, strict=True)]
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            return total if linear.bias is None else total + linear.bias

        return forward

    if ranks > 1:
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in ROW_PARALLEL:
                replaced: Any = module
                replaced.forward = split(module)
    return model


def check_twin(checkpoint: Path, *, dtypes: Sequence[str], plan: ModulePlan) -> list[dict[str, Any]]:
    """Check the modules of a tiny twin of a checkpoint's architecture, with perturbed weights; see `check`.

    Its config keeps every flag of the original. Sizes are small and unequal, and no weight has its neutral value.
    """
    import tempfile

    from pilotage.arch import source, twin

    with tempfile.TemporaryDirectory(prefix="pilotage-twin-") as directory:
        path = twin.build(twin.shrink(source.load_config(str(checkpoint)).to_dict()), Path(directory) / "twin")
        model = hf.load(path, torch.float32)
        vocabulary = model.get_input_embeddings().weight.shape[0]
        tokens = torch.randint(5, vocabulary, (TWIN_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
        return check(path, path, model, tokens, dtypes=dtypes, plan=plan)


def listed(model: Any, patterns: Sequence[str] | None) -> tuple[list[tuple[str, str]], list[str]]:
    """Return (name, kind) of the modules that a plan means, and the kinds of layer whose RoPE is compared.

    Raises:
        ConfigError: a pattern that means nothing.
    """
    decoder = model.get_decoder()
    types = layer_types(model, len(decoder.layers))
    if patterns is None:
        shared = getattr(model.config.get_text_config(), "num_kv_shared_layers", None) or 0
        return names(decoder, chosen(types, shared)), list(dict.fromkeys(types))
    everything = [*names(decoder, range(len(types))), *linears(decoder)]
    known = [*(name for name, _ in everything), "rotary_emb"]
    picked = sites.select(patterns, known, where="--module")
    return [entry for entry in everything if entry[0] in picked], (
        list(dict.fromkeys(types)) if "rotary_emb" in picked else []
    )


def _jobs(
    wanted: Sequence[tuple[str, str]], types: Sequence[str], expected: HFModules, dtype: torch.dtype
) -> list[Job]:
    """Ask every module for its output at the input that it has in the reference, norms at a small one as well."""
    jobs = []
    for name, kind in wanted:
        x = expected.calls[name].x
        if x.is_floating_point():
            x = x.to(dtype).float()
        layer, beside = "", {}
        if kind in CONTEXT:
            layer = types[int(name.split(".")[1])]
            beside = {key: value.to(dtype).float() for key, value in expected.beside(name).items()}
        jobs.append(Job(name=name, kind=kind, label=name, x=x, layer_type=layer, beside=beside))
        if kind == "embedding":
            # Rows that no token of the stream has: what was not loaded into them shows nowhere else.
            ids = _everywhere(expected.decoder.get_submodule(name).weight.shape[0])
            jobs.append(Job(name=name, kind=kind, label=f"{name} (all tokens)", x=ids[None], layer_type=""))
        eps = _epsilon(expected.decoder.get_submodule(name)) if kind == "norm" else None
        if eps is not None:
            small = (x * (SMALL * eps**0.5 / x.square().mean().sqrt())).to(dtype).float()
            jobs.append(Job(name=name, kind=kind, label=f"{name} (small input)", x=small, layer_type=""))
    return jobs


def _everywhere(size: int) -> Tensor:
    """Return ids of the whole vocabulary; of a large one both ends and an even choice between."""
    if size <= MOST_ROWS:
        return torch.arange(size)
    even = torch.linspace(0, size - 1, MOST_ROWS, dtype=torch.float64).round().long()
    return torch.cat((torch.arange(64), even, torch.arange(size - 64, size))).unique()


def _compared(
    job: Job, target: Tensor | None, expected: HFModules, baseline: HFModules, fp32: Any
) -> tuple[tuple[Tensor | None, Tensor, Tensor], dict[str, Any]]:
    """Return (target, expected, baseline), and of attention how far off the decode steps are by themselves.

    These are shown and not judged: a few rows whose largest channel is rounded the other way are no fault. A fault of
    decode alone is far over the floors of the whole in fp32. What is expected of a router are the logits of its weights
    as they are in the serving dtype, whose rounding would hide in which dtype it multiplies.
    """
    if job.kind == "router":
        return (target, baseline.logits(job.name, job.x, exactly=True), baseline.logits(job.name, job.x)), {}
    # The reference's masks and positions are those of its own forward in its own attention implementation.
    before = fp32.config._attn_implementation
    hf.set_attention(fp32, "sdpa")
    truth, routed = _run(job, expected)
    fp32.set_attn_implementation(before)
    other, again = _run(job, baseline)
    rows = torch.arange(truth.shape[1]) if truth.ndim == 3 else None
    if rows is not None and routed is not None and again is not None:
        rows = rows[routed.beyond_doubt(again.logits)]
        truth, other = truth[:, rows], other[:, rows]
        target = None if target is None else target[:, rows]
    shown: dict[str, Any] = {}
    if job.kind in CONTEXT and target is not None and target.shape == truth.shape and rows is not None:
        decoded = rows >= len(job.x[0]) - OurModules.DECODED
        arms = {"target": target, "baseline": other}
        shown["decode_relative_l2"] = {
            name: finite(metrics.relative_l2(x[:, decoded], truth[:, decoded])) for name, x in arms.items()
        }
    return (target, truth, other), shown


def _run(job: Job, arm: HFModules) -> tuple[Tensor, Routing | None]:
    """Run a job on one of Hugging Face's; also how its router chose, if it has one."""
    routed = arm.routed(job.name, job.x, job.beside) if job.kind in ROUTED else None
    return (arm.run(job.name, job.x, job.beside), None) if routed is None else routed


def _epsilon(norm: Any) -> float | None:
    found = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return float(found) if found else None


def _judge(job: Job, dtype: torch.dtype, target: Tensor | None, expected: Tensor, baseline: Tensor) -> list[Verdict]:
    name = job.label
    if target is None:
        claim = f"{name}: error no larger than the baseline's"
        return [gates.single(Status.NOT_MEASURED, claim, "module", "our model has no module of this name")]
    if dtype is torch.float32:
        return gates.floored(target, expected, baseline, name=name)
    return gates.three_way(target, expected, baseline, rtol=metrics.RMS_FLOOR, name=name)


def _to_the_bit(job: Job, target: Tensor, other: Tensor, baseline: HFModules) -> list[Verdict]:
    """Judge by its rounding what sums nothing in a half precision: a look-up has no other bits, a norm no more loss."""
    if job.kind == "embedding":
        return [gates.same_bits(target, other, name=job.label)]
    if job.kind == "norm":
        return [gates.rounds_alike(target, baseline.exactly(job.name, job.x), other, name=job.label)]
    return []


def _rope_jobs(kinds: Sequence[str], types: Sequence[str], fp32: Any, expected: HFModules) -> list[Job]:
    longest = int(fp32.config.get_text_config().max_position_embeddings)
    positions = torch.tensor(
        sorted({*range(expected.tokens.shape[1]), *(far for far in FAR if far < longest), longest - 1})
    )
    single = len(set(types)) == 1
    return [
        Job(
            name="rotary_emb",
            kind="rope",
            label="rotary_emb" if single else f"rotary_emb ({kind})",
            x=positions,
            layer_type=kind,
        )
        for kind in kinds
    ]


def _rope(job: Job, ours: Tensor | None, fp32: Any, expected: HFModules, baseline: HFModules) -> list[Verdict]:
    assert ours is not None
    tables = [torch.stack(arm.rope(job.x, job.layer_type)).float() for arm in (expected, baseline)]
    if tables[0].shape[-1] * 2 == ours.shape[-1]:
        # Some of Hugging Face's models keep one half of the table: the other is the same again.
        tables = [torch.cat((table, table), dim=-1) for table in tables]
    # An fp32 angle at position p is itself uncertain by p eps / 2, whoever computes it.
    rtol = metrics.FLOAT32_EPS * int(fp32.config.get_text_config().max_position_embeddings)
    return gates.three_way(ours.float(), *tables, rtol=rtol, name=job.label)


def _entry(name: str, kind: str, dtype: str, verdicts: Sequence[Verdict], **shown: Any) -> dict[str, Any]:
    status = worst([verdict.status for verdict in verdicts])
    deciding = next(verdict for verdict in verdicts if verdict.status is status)
    evidence = {**deciding.evidence, **shown}
    evidence["rules"] = {verdict.metric: [verdict.estimate, verdict.bound] for verdict in verdicts}
    verdict = {**deciding.to_json(), "evidence": evidence}
    return {"module": name, "kind": kind, "dtype": dtype, "verdict": verdict}
