"""The three-way comparison of a whole model's logits: rows in, verdicts and the numbers behind them out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pilotage.accuracy import gates, metrics, prompts
from pilotage.accuracy.arms import hf
from pilotage.accuracy.arms.base import Arm, Stream
from pilotage.accuracy.gates import ControlErrors
from pilotage.accuracy.logit_errors import LogitErrors, logit_errors
from pilotage.core.errors import BadInput
from pilotage.core.nouns import Status, Verdict, worst

TIE_GAP = 1e-4


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """One dtype of the validation.

    Attributes:
        arm: its name, which is the dtype's.
        verdicts: whole-model verdicts.
        by_position: for each compared row its stream, position, phase and errors; ratios are over the baseline's error
            or its floor in float32, whichever is more.
        topk_errors: largest scaled error within the top k, by k, of target and baseline.
        ties: rows where target and reference prefer different tokens.
        receipt: what ran in the engine.
        baseline: what the target was compared with.
        controls: what the bound came from.
        n_tokens: rows compared.
        kv: the layers of the KV cache, JSON-ready; None where it was not read.
    """

    arm: str
    verdicts: list[Verdict]
    by_position: list[dict[str, Any]]
    topk_errors: dict[str, dict[str, float | None]]
    ties: list[dict[str, Any]]
    receipt: Mapping[str, Any]
    baseline: str
    controls: dict[str, Any]
    n_tokens: int
    kv: dict[str, Any] | None = None

    @property
    def status(self) -> Status:
        return worst([verdict.status for verdict in self.verdicts])

    def to_json(self) -> dict[str, Any]:
        return {
            "arm": self.arm,
            "status": self.status.value,
            "baseline": self.baseline,
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
            "by_position": self.by_position,
            "topk_errors": self.topk_errors,
            "ties": self.ties,
            "controls": self.controls,
            "n_tokens": self.n_tokens,
            "kv": self.kv,
        }


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The reference's tokens and logits, and what every comparison with them needs.

    Attributes:
        path: its checkpoint directory.
        streams: prompts with the reference's greedy continuation.
        logits: [rows, V] fp32 of all streams, joined.
        phases: phase of each row.
        where: stream index and position of each row.
    """

    path: Path
    streams: list[Stream]
    logits: Tensor
    phases: list[str]
    where: list[tuple[int, int]]


def reference(path: Path, model: Any, tokens: Sequence[Sequence[int]], new_tokens: int) -> Reference:
    """Let the fp32 reference continue the prompts and compute its logits.

    Args:
        path: its checkpoint.
        model: the loaded model, fp32.
        tokens: prompts.
        new_tokens: tokens to generate after each.
    """
    sequences = hf.greedy(model, tokens, new_tokens)
    streams = prompts.streams(
        sequences, [len(prompt) for prompt in tokens], vocab_size=model.get_output_embeddings().weight.shape[0]
    )
    where = [(index, position) for index, stream in enumerate(streams) for position in stream.positions]
    return Reference(
        path=path,
        streams=streams,
        logits=joined(hf.HFArm(model, "hf_fp32"), streams),
        phases=[streams[index].phase(position) for index, position in where],
        where=where,
    )


def joined(arm: Arm, streams: Sequence[Stream]) -> Tensor:
    """Return an arm's logits of all streams as one [rows, V] tensor."""
    return torch.cat(list(arm.observe(streams).logits))


def compare(
    reference: Reference,
    target: Tensor,
    baseline: Tensor,
    found: Sequence[ControlErrors],
    *,
    arm: str,
    about: Mapping[str, Any] | None = None,
    receipt: Mapping[str, Any] | None = None,
    baseline_name: str = "",
) -> ArmResult:
    """Judge a target's logits and lay out the numbers behind it.

    Args:
        reference: tokens and fp32 logits.
        target: [rows, V] logits of the target.
        baseline: [rows, V] logits of the baseline.
        found: measured clean controls.
        arm: "bfloat16" or "float32".
        about: how the controls were had.
        receipt: what ran in the engine.
        baseline_name: what the baseline is.
    """
    expected, n = reference.logits, len(reference.where)
    if target.shape != expected.shape:
        # A head padded to a round size is served with its padding cut off; anything else is another vocabulary.
        raise BadInput(
            f"the target's vocabulary is {target.shape[-1]}, the reference's {expected.shape[-1]}",
            where="--reference",
            do="compare checkpoints of one vocabulary",
        )
    dtype = getattr(torch, arm)
    rows = {"target": metrics.row_errors(target, expected), "baseline": metrics.row_errors(baseline, expected)}
    logits = {
        "target": logit_errors(target, expected, dtype=dtype),
        "baseline": logit_errors(baseline, expected, dtype=dtype),
    }
    measured = metrics.model_errors(rows["target"], rows["baseline"], reference.phases)
    verdicts = [_locate(verdict, reference) for verdict in gates.whole_model(measured, found, arm=arm, n=n)]
    return ArmResult(
        arm=arm,
        verdicts=verdicts,
        by_position=_by_position(reference, rows, logits),
        topk_errors={
            k: _pair(float(logits["target"].topk[k].amax()), float(logits["baseline"].topk[k].amax()))
            for k in logits["target"].topk
        },
        ties=_ties(reference, logits["target"]),
        receipt=receipt or {},
        baseline=baseline_name,
        controls=dict(about or {}),
        n_tokens=n,
    )


def _locate(verdict: Verdict, reference: Reference) -> Verdict:
    """Say which token a verdict about one row means."""
    if "row" not in verdict.evidence:
        return verdict
    evidence = dict(verdict.evidence)
    stream, position = reference.where[evidence.pop("row")]
    return dataclasses.replace(verdict, evidence={**evidence, "stream": stream, "position": position})


def finite(value: float) -> float | None:
    """Return `value`, or None where JSON has no number for it."""
    return value if abs(value) != float("inf") and value == value else None


def _pair(target: float, baseline: float) -> dict[str, float | None]:
    ratio = target / baseline if baseline else (1.0 if target == 0 else float("inf"))
    return {"target": finite(target), "baseline": finite(baseline), "ratio": finite(ratio)}


def _by_position(
    reference: Reference, rows: Mapping[str, metrics.RowErrors], logits: Mapping[str, LogitErrors]
) -> list[dict[str, Any]]:
    found = []
    for row, (stream, position) in enumerate(reference.where):
        entry: dict[str, Any] = {"stream": stream, "position": position, "phase": reference.phases[row]}
        for name in ("target", "baseline"):
            entry[name] = {
                "linf": finite(float(rows[name].linf[row])),
                "l2": finite(float(rows[name].l2[row])),
                "kl": finite(float(logits[name].kl[row])),
                "top1": bool(logits[name].top1[row]),
                "ulps": finite(float(logits[name].ulps[row])),
            }
        target, baseline = rows["target"], rows["baseline"]
        # The floors of the verdicts: a baseline that is exact by luck makes no target infinitely wrong.
        size = float(target.expected_sq[row]) ** 0.5
        units = {
            "linf": max(float(baseline.linf[row]), metrics.LINF_FLOOR * size / target.width**0.5),
            "l2": max(float(baseline.l2[row]), metrics.RMS_FLOOR * size),
        }
        entry["ratio"] = {name: _pair(float(getattr(target, name)[row]), unit)["ratio"] for name, unit in units.items()}
        found.append(entry)
    return found


def _ties(reference: Reference, logits: LogitErrors) -> list[dict[str, Any]]:
    """List the rows whose most likely token differs, with how close the reference's two best were."""
    return [
        {
            "stream": reference.where[row][0],
            "position": reference.where[row][1],
            "expected_token": int(logits.expected_top[row]),
            "target_token": int(logits.actual_top[row]),
            "gap": float(logits.gap[row]),
            "tie": bool(logits.gap[row] < TIE_GAP),
            "ulps": finite(float(logits.ulps[row])),
        }
        for row in (~logits.top1).nonzero().flatten().tolist()
    ]
