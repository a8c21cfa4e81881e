"""The KV cache, three-way: what the engine has in its pages after decode, against Hugging Face in both dtypes.

Per layer, head and position, over several prompts at once. Keys are compared as attention reads them, normalised and
rotated. The guide's criterion, a Bhattacharyya coefficient of 0.99 between the laws of the two arms' errors, is
reported for every layer; the verdict comes from ratios of error sizes, and says where the two disagree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pilotage.accuracy import error_laws, gates, level_gates, metrics
from pilotage.accuracy.arms.base import LayerKV
from pilotage.accuracy.comparison import finite
from pilotage.core.errors import BadInput
from pilotage.core.nouns import Status, Verdict

# Stretches that the positions of a stream are drawn together to.
BINS = 24


@dataclass(frozen=True, kw_only=True)
class KVErrors:
    """How keys or values of a target and of a baseline differ from the same expected ones.

    Attributes:
        n: tokens. rows: tokens times heads. width: of a head. elements: all together.
        ratio: pooled RMS over the baseline's (or its fp32 floor), clustered by token, bootstrapped.
        trimmed: the same without the elements where either error is among the largest 1% of both.
        worst_row: largest RMS of one head at one token, in units of max(the baseline's there, its median row, its
            relative error times the row's size).
        worst_at: (token, head) of it.
        heads: the pooled ratio of each head.
        tokens: the ratio of each token over all heads.
        bhattacharyya: coefficient of the two laws of errors.
        least_cosine: least cosine of a head at a token with the expected one.
    """

    n: int
    rows: int
    width: int
    elements: int
    ratio: metrics.Ratio
    trimmed: metrics.Ratio
    worst_row: float
    worst_at: tuple[int, int]
    heads: list[float]
    tokens: Tensor
    bhattacharyya: float
    least_cosine: float


def kv_errors(target: Tensor, expected: Tensor, baseline: Tensor) -> KVErrors:
    """Measure keys or values [tokens, K, H] of one layer, any float dtype.

    Raises:
        BadInput: shapes differ.
    """
    if not target.shape == expected.shape == baseline.shape or expected.ndim != 3:
        shapes = [tuple(x.shape) for x in (target, expected, baseline)]
        raise BadInput(f"target, expected, baseline are {shapes}, not one [tokens, heads, size]", where="KV cache")
    n, heads, width = expected.shape
    e = expected.detach().double()
    error_a, error_b = metrics.errors(target, expected), metrics.errors(baseline, expected)
    a, b, e_sq = (x.square().sum(-1) for x in (error_a, error_b, e))  # [tokens, heads]
    floor = e_sq * metrics.RMS_FLOOR**2
    unit = b if float(b.sum()) >= float(floor.sum()) else floor
    total_e = float(e_sq.sum())
    relative_sq = max(float(b.sum()) / total_e if total_e else 0.0, metrics.RMS_FLOOR**2)
    row_unit = torch.maximum(b, e_sq * relative_sq)
    if n:
        row_unit = row_unit.clamp_min(float(b.median()))
    by_row = torch.where(a == 0, 0.0, a / row_unit).sqrt()
    worst = int(by_row.argmax()) if n else 0

    pooled = torch.maximum(error_a.abs(), error_b.abs())
    kept = pooled <= pooled.reshape(-1).kthvalue(max(1, math.floor(0.99 * pooled.numel()))).values if n else pooled > 0
    trimmed_a, trimmed_b = (torch.where(kept, x.square(), 0.0).sum((1, 2)) for x in (error_a, error_b))
    trimmed_floor = torch.where(kept, e.square(), 0.0).sum((1, 2)) * metrics.RMS_FLOOR**2
    if float(trimmed_b.sum()) < float(trimmed_floor.sum()):
        trimmed_b = trimmed_floor

    def ratios(dim: int) -> Tensor:
        top, bottom = a.sum(dim), unit.sum(dim)
        return torch.where(top == 0, 0.0, top / bottom).sqrt()

    t = target.detach().double()
    cosine = (t * e).sum(-1) / (t.norm(dim=-1) * e.norm(dim=-1))
    cosine = torch.where((t.norm(dim=-1) == 0) & (e_sq == 0), 1.0, cosine)
    least = float(torch.where(cosine.isfinite(), cosine, -1.0).amin()) if n else math.nan
    return KVErrors(
        n=n,
        rows=n * heads,
        width=width,
        elements=n * heads * width,
        ratio=error_laws.bootstrap_ratio(a.sum(1), unit.sum(1)),
        trimmed=error_laws.bootstrap_ratio(trimmed_a, trimmed_b),
        worst_row=float(by_row.reshape(-1)[worst]) if n else math.nan,
        worst_at=divmod(worst, heads) if heads else (0, 0),
        heads=[float(x) for x in ratios(0)],
        tokens=ratios(1),
        bhattacharyya=error_laws.bhattacharyya(error_a, error_b),
        least_cosine=least,
    )


def kv_three_way(target: Tensor, expected: Tensor, baseline: Tensor, *, name: str = "KV cache") -> list[Verdict]:
    """Judge cached keys or values [tokens, K, H] by the error of a baseline, without controls; see `level_gates`."""
    return level_gates.kv_tensor(kv_errors(target, expected, baseline), name=name)


@dataclass(frozen=True, kw_only=True)
class KVLayer:
    """Keys or values of one layer over all streams.

    Attributes:
        layer: "layers.0.self_attn". kind: "k" or "v".
        errors: what was measured.
        where: stream and position of each token.
    """

    layer: str
    kind: str
    errors: KVErrors
    where: list[tuple[int, int]]

    def to_json(self) -> dict[str, Any]:
        found = self.errors
        stream, position = self.where[found.worst_at[0]] if self.where else (None, None)
        said = level_gates.bhattacharyya_says(found.bhattacharyya, error_laws.CRITERION)
        return {
            "layer": self.layer,
            "kind": self.kind,
            "ratio": finite(found.ratio.estimate),
            "interval": [finite(found.ratio.low), finite(found.ratio.high)],
            "heads": [finite(x) for x in found.heads],
            "worst_row": finite(found.worst_row),
            "worst_at": {"stream": stream, "position": position, "head": found.worst_at[1]},
            "bhattacharyya": finite(found.bhattacharyya),
            "bhattacharyya_says": said.value,
            "least_cosine": finite(found.least_cosine),
            "tokens": found.n,
            "by_position": self._by_position(),
        }

    def _by_position(self) -> list[dict[str, Any]]:
        """The largest ratio in each of a few stretches of every stream: what a map can show."""
        streams: dict[int, list[tuple[int, float]]] = {}
        for (stream, position), value in zip(self.where, self.errors.tokens.tolist(), strict=True):
            streams.setdefault(stream, []).append((position, value))
        found = []
        for stream, rows in streams.items():
            width = -(-len(rows) // BINS)
            bins = [rows[start : start + width] for start in range(0, len(rows), width)]
            found.append(
                {
                    "stream": stream,
                    "positions": [part[0][0] for part in bins],
                    "ratio": [finite(round(max(value for _, value in part), 4)) for part in bins],
                }
            )
        return found


Cache = Sequence[Sequence[LayerKV]]


def layers(target: Cache, expected: Cache, baseline: Cache) -> list[KVLayer]:
    """Measure every layer's keys and values at the positions that the target still holds, all streams together.

    Raises:
        BadInput: the arms have other layers, or heads that cannot be paired.
    """
    found = []
    for index, layer in enumerate(expected[0]):
        for kind in ("k", "v"):
            parts: list[tuple[Tensor, Tensor, Tensor]] = []
            where: list[tuple[int, int]] = []
            for stream, (ours, truth, other) in enumerate(zip(target, expected, baseline, strict=True)):
                ours_layer = _same(ours, layer.layer)
                t, e, b = (x.keys if kind == "k" else x.values for x in (ours_layer, truth[index], other[index]))
                first = ours_layer.first
                count = min(len(t), len(e) - first)
                parts.append(
                    (_heads(t[:count], e.shape[1], layer.layer), e[first : first + count], b[first : first + count])
                )
                where += [(stream, first + position) for position in range(count)]
            errors = kv_errors(*(torch.cat(column) for column in zip(*parts, strict=True)))
            found.append(KVLayer(layer=layer.layer, kind=kind, errors=errors, where=where))
    return found


def _same(cache: Sequence[LayerKV], name: str) -> LayerKV:
    for layer in cache:
        if layer.layer == name:
            return layer
    raise BadInput(f"the engine has no cache of this name, but {[layer.layer for layer in cache][:3]}...", where=name)


def _heads(ours: Tensor, heads: int, name: str) -> Tensor:
    """Take one of each group of replicas: ranks beyond the number of heads hold the same ones."""
    copies, rest = divmod(ours.shape[1], heads)
    if rest or not copies:
        raise BadInput(f"{ours.shape[1]} cached heads, Hugging Face has {heads}", where=name)
    if copies > 1 and not torch.equal(ours[:, ::copies], ours[:, copies - 1 :: copies]):
        raise BadInput("ranks that hold the same head hold other values", where=name)
    return ours[:, ::copies]


@dataclass(frozen=True, kw_only=True)
class KVResult:
    """The KV comparison of one arm: verdicts, and the numbers of every layer."""

    verdicts: list[Verdict]
    layers: list[KVLayer]
    about: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
            "layers": [layer.to_json() for layer in self.layers],
            "controls": self.about,
        }


@dataclass(frozen=True, kw_only=True)
class KVSide:
    """What Hugging Face has cached in one dtype, and its controls: name -> {"high", "worst_row"}."""

    baseline: Cache
    controls: dict[str, dict[str, float]]
    about: dict[str, Any]


def extremes(found: Sequence[KVLayer]) -> dict[str, float]:
    """The largest of each statistic over layers, keys and values: one test, however many layers there are."""
    return {
        "high": max(layer.errors.ratio.high for layer in found),
        "worst_row": max(layer.errors.worst_row for layer in found),
    }


def judge(target: Cache, expected: Cache, side: KVSide, *, arm: str) -> KVResult:
    """Judge what an engine has cached by clean controls of the same model.

    Args:
        target: of the engine.
        expected: of the fp32 reference.
        side: baseline and controls.
        arm: its dtype.
    """
    found = layers(target, expected, side.baseline)
    name = f"{arm}: KV cache"
    ratios = [layer.errors.ratio for layer in found]
    worst = max(range(len(found)), key=lambda i: _or_infinite(ratios[i].estimate))
    row = max(range(len(found)), key=lambda i: _or_infinite(found[i].errors.worst_row))
    n = found[worst].errors.n
    largest = ratios[worst].estimate
    # All layers are on the good side of the bound, or the one that is furthest on the bad one fails.
    interval = (max(_or_infinite(r.low) for r in ratios), max(_or_infinite(r.high) for r in ratios))
    stream, position = found[row].where[found[row].errors.worst_at[0]]
    verdicts = [
        level_gates.by_controls(
            largest,
            interval,
            {control: values["high"] for control, values in side.controls.items()},
            claim=f"{name}: no layer's keys or values err more than a clean implementation's",
            metric="kv_rms_ratio",
            n=n,
            evidence={"layer": found[worst].layer, "kind": found[worst].kind},
        ),
        level_gates.by_controls(
            found[row].errors.worst_row,
            None,
            {control: values["worst_row"] for control, values in side.controls.items()},
            claim=f"{name}: no head at any token is far off",
            metric="kv_worst_row",
            n=sum(layer.errors.rows for layer in found),
            evidence={
                "layer": found[row].layer,
                "kind": found[row].kind,
                "head": found[row].errors.worst_at[1],
                "stream": stream,
                "position": position,
            },
        ),
    ]
    return KVResult(verdicts=_with_coefficients(verdicts, found), layers=found, about=side.about)


def rounded_cache(receipt: Mapping[str, Any]) -> str | None:
    """Return the 8-bit dtype that an engine's receipt says its cache has; None where it keeps what was computed."""
    dtype = str((receipt.get("kv_cache") or {}).get("dtype", ""))
    return dtype if "float8" in dtype else None


def not_comparable(dtype: str, *, arm: str) -> Verdict:
    """Say that a rounded cache was not judged: Hugging Face keeps every digit, and its controls know no rounding."""
    return gates.single(
        Status.NOT_MEASURED,
        f"{arm}: KV cache: no layer's keys or values err more than a clean implementation's",
        "kv_rms_ratio",
        f"the engine stores keys and values as {dtype}; the reference's are not rounded",
    )


def _or_infinite(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _with_coefficients(verdicts: Sequence[Verdict], found: Sequence[KVLayer]) -> list[Verdict]:
    """Say beside the first verdict what the Bhattacharyya rule would have decided, and whether the two disagree."""
    least = min(found, key=lambda layer: layer.errors.bhattacharyya)
    said = [level_gates.bhattacharyya_says(layer.errors.bhattacharyya, error_laws.CRITERION) for layer in found]
    rule = Status.FAIL if Status.FAIL in said else Status.PASS
    evidence = {
        **verdicts[0].evidence,
        "bhattacharyya": finite(least.errors.bhattacharyya),
        "bhattacharyya_layer": f"{least.layer}.{least.kind}",
        "criterion": error_laws.CRITERION,
        "bhattacharyya_says": rule.value,
        "layers_below_criterion": said.count(Status.FAIL),
        "disagree": rule is not verdicts[0].status,
        "least_cosine": finite(min(layer.errors.least_cosine for layer in found)),
    }
    return [dataclasses.replace(verdicts[0], evidence=evidence), *verdicts[1:]]
