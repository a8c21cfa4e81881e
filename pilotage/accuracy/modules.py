"""Module checks: attention, MLP, norms, RoPE, embedding and decoder layers against Hugging Face, with the real weights.

Every module gets the input that it has in the fp32 reference, rounded to the dtype under test, so that errors do not
travel from one module to the next: the one that fails is the one at fault, or contains it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pilotage.accuracy import gates, metrics
from pilotage.accuracy.arms import hf
from pilotage.accuracy.arms.module import HFModules, OurModules
from pilotage.core.nouns import Status, Verdict, worst

# Norms are run a second time on inputs this many times larger than the square root of their epsilon: under ordinary
# activations no number shows a wrong epsilon.
SMALL = 3.0
# Positions at which RoPE is compared besides those of the stream, up to the model's longest.
FAR = (1000, 5000, 20000, 100000)


def layer_types(hf_model: Any, layers: int) -> list[str]:
    """Return the kind of attention of each layer, "full_attention" where the config has no pattern."""
    config = hf_model.config.get_text_config()
    return list(getattr(config, "layer_types", None) or ["full_attention"] * layers)


def chosen(types: Sequence[str]) -> list[int]:
    """Choose the first layer of each kind, and the last layer."""
    return sorted({*(types.index(kind) for kind in types), len(types) - 1})


def names(decoder: Any, layers: Sequence[int]) -> list[tuple[str, str]]:
    """List (module name relative to the decoder, kind) of everything that is checked, in the order of the model."""
    found = [("embed_tokens", "embedding")]
    for index in layers:
        layer = decoder.layers[index]
        inner = [name for name, _ in layer.named_modules() if name and name.split(".")[-1].endswith("norm")]
        found += [(f"layers.{index}", "decoder layer"), (f"layers.{index}.self_attn", "attention")]
        found += [(f"layers.{index}.mlp", "mlp"), *((f"layers.{index}.{name}", "norm") for name in inner)]
    return [*found, ("norm", "norm")]


def check(
    target: Path,
    reference: Path,
    fp32: Any,
    tokens: Sequence[int],
    *,
    dtypes: Sequence[str] = ("bfloat16", "float32"),
    rounded: torch.dtype | None = None,
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
    decoder = fp32.get_decoder()
    types = layer_types(fp32, len(decoder.layers))
    layers = chosen(types)
    wanted = names(decoder, layers)
    expected = HFModules(fp32, tokens, [name for name, _ in wanted])
    results = []
    for dtype_name in dtypes:
        dtype = getattr(torch, dtype_name)
        if dtype is torch.float32:
            fp32.set_attn_implementation("eager")
            baseline = HFModules(fp32, tokens, [name for name, _ in wanted])
            other = fp32
        else:
            other = hf.load(reference, dtype, rounded_to=rounded)
            baseline = HFModules(other, tokens, [name for name, _ in wanted])
        ours = OurModules(target, dtype, len(tokens))
        for name, kind, values in _outputs(wanted, types, expected, baseline, ours, fp32):
            verdicts = _judge(name, dtype, *values)
            results.append(_entry(name, kind, dtype_name, verdicts))
        for kind in dict.fromkeys(types):
            name = "rotary_emb" if len(set(types)) == 1 else f"rotary_emb ({kind})"
            results.append(_entry(name, "rope", dtype_name, _rope(name, kind, fp32, expected, baseline, ours)))
        fp32.set_attn_implementation("sdpa")
    return results


def _outputs(
    wanted: Sequence[tuple[str, str]],
    types: Sequence[str],
    expected: HFModules,
    baseline: HFModules,
    ours: OurModules,
    fp32: Any,
) -> Iterator[tuple[str, str, tuple[Tensor | None, Tensor, Tensor]]]:
    """Yield name, kind and (target, expected, baseline) of every module; the target is None where we have none."""
    for name, kind in wanted:
        x = expected.calls[name].x
        if x.is_floating_point():
            x = x.to(ours.dtype).float()
        target: Tensor | None = None
        if ours.module(name) is not None:
            if kind == "embedding":
                target = ours.embed(x)
            elif kind in ("attention", "decoder layer"):
                target = ours.with_context(name, x, types[int(name.split(".")[1])])
            else:
                target = ours.run(name, x)
        if kind in ("attention", "decoder layer"):
            # The reference's masks and positions are those of its own forward in its own attention implementation.
            before = fp32.config._attn_implementation
            fp32.set_attn_implementation("sdpa")
            truth = expected.run(name, x)
            fp32.set_attn_implementation(before)
        else:
            truth = expected.run(name, x)
        yield name, kind, (target, truth, baseline.run(name, x))
        if kind == "norm" and ours.module(name) is not None:
            eps = _epsilon(expected.decoder.get_submodule(name))
            if eps is not None:
                small = x * (SMALL * eps**0.5 / x.square().mean().sqrt())
                small = small.to(ours.dtype).float()
                values = (ours.run(name, small), expected.run(name, small), baseline.run(name, small))
                yield f"{name} (small input)", kind, values


def _epsilon(norm: Any) -> float | None:
    found = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return float(found) if found else None


def _judge(name: str, dtype: torch.dtype, target: Tensor | None, expected: Tensor, baseline: Tensor) -> list[Verdict]:
    if target is None:
        claim = f"{name}: error no larger than the baseline's"
        return [gates.single(Status.NOT_MEASURED, claim, "module", "our model has no module of this name")]
    if dtype is torch.float32:
        return gates.floored(target, expected, baseline, name=name)
    return gates.three_way(target, expected, baseline, rtol=metrics.RMS_FLOOR, name=name)


def _rope(name: str, kind: str, fp32: Any, expected: HFModules, baseline: HFModules, ours: OurModules) -> list[Verdict]:
    longest = int(fp32.config.get_text_config().max_position_embeddings)
    positions = torch.tensor(
        sorted({*range(expected.tokens.shape[1]), *(far for far in FAR if far < longest), longest - 1})
    )
    tables = [torch.stack(arm.rope(positions, kind)).float() for arm in (ours, expected, baseline)]
    # An fp32 angle at position p is itself uncertain by p eps / 2, whoever computes it.
    rtol = metrics.FLOAT32_EPS * longest
    return gates.three_way(*tables, rtol=rtol, name=name)


def _entry(name: str, kind: str, dtype: str, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    status = worst([verdict.status for verdict in verdicts])
    deciding = next(verdict for verdict in verdicts if verdict.status is status)
    evidence = dict(deciding.evidence)
    evidence["rules"] = {verdict.metric: [verdict.estimate, verdict.bound] for verdict in verdicts}
    verdict = {**deciding.to_json(), "evidence": evidence}
    return {"module": name, "kind": kind, "dtype": dtype, "verdict": verdict}
