"""Numbers from what was timed, and ratios between arms. Pure functions."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pilotage.bench.loads import Load
from pilotage.core.errors import Unavailable

# Metric -> whether more is better. Ratios are always "how many times better we are".
METRICS = {
    "decode_tok_s": True,
    "steady_tok_s": True,
    "output_tok_s": True,
    "ttft_ms": False,
    "itl_ms": False,
    "itl_p99_ms": False,
}
MEMORY = "memory"
PEAK_RSS = "peak_rss_mib"

# A steady phase is measured over so many tokens of each request at least.
STEADY_STEPS = 16

Values = dict[str, dict[str, list[float]]]


class InOnePiece(Unavailable):
    """All tokens of all answers reached the client together."""


def metrics(
    load: Load,
    *,
    ttfts_s: Sequence[float],
    decode_s: Sequence[float],
    output_lens: Sequence[int],
    duration_s: float,
    gaps_s: Sequence[Sequence[float]] = (),
    starts_s: Sequence[float] = (),
) -> dict[str, float]:
    """Turn the times of one repeat into its metrics.

    Args:
        load: what was asked.
        ttfts_s: per request, seconds to the first token.
        decode_s: per request, seconds from the first token to the last.
        output_lens: per request, tokens of the answer.
        duration_s: of the whole repeat.
        gaps_s: per request, seconds between one token and the next; none where the arm does not tell.
        starts_s: per request, when it was sent, on any clock; the same.

    Returns:
        `ttft_ms` and `output_tok_s`; with a decode phase `itl_ms` (mean time between tokens of a request),
        `decode_tok_s` (tokens a second of all requests that run at once, the first token apart), of more than a
        hundred gaps `itl_p99_ms` (what 99% of them stay under) and, where all requests run at once for a while,
        `steady_tok_s` (see `steady`).

    Raises:
        Unavailable: an answer of another length than was asked for, or none.
        InOnePiece: there is no time between tokens.
    """
    if not output_lens or (not load.spread and any(n != load.output_len for n in output_lens)):
        raise Unavailable(
            f"answers of {sorted(set(output_lens))} tokens came back, {load.output_len} were asked for",
            where=load.name,
            do="look for errors in the server's log",
        )
    out = {"ttft_ms": statistics.fmean(ttfts_s) * 1e3, "output_tok_s": sum(output_lens) / duration_s}
    if load.decodes:
        steps = sum(n - 1 for n in output_lens)
        itl_s = sum(decode_s) / steps
        if itl_s <= 0:  # a server that falls behind its own engine sends what has piled up at once
            raise InOnePiece(
                "every answer came in one piece: there is no time between tokens",
                where=load.name,
                do="measure on a machine with less other work, or ask for longer answers",
            )
        out["itl_ms"] = itl_s * 1e3
        out["decode_tok_s"] = min(load.concurrency, len(output_lens)) / itl_s
        every = [gap for gaps in gaps_s for gap in gaps]
        if len(every) > 100:
            out["itl_p99_ms"] = statistics.quantiles(every, n=100)[-1] * 1e3
        if 1 < len(output_lens) <= load.concurrency and starts_s:
            rate = steady([s + t for s, t in zip(starts_s, ttfts_s, strict=True)], gaps_s, output_lens)
            out |= {} if rate is None else {"steady_tok_s": rate}
    return out


def steady(first_s: Sequence[float], gaps_s: Sequence[Sequence[float]], output_lens: Sequence[int]) -> float | None:
    """Return the tokens a second of all requests while every one of them decodes.

    That is from the moment at which the last of them has its first token to the one at which the first of them has its
    last: before it, prompts of others hold up who decodes already, and after it fewer are left.

    Args:
        first_s: per request, when it had its first token.
        gaps_s: per request, the times between what it was sent after that: a token, or several that had piled up.
        output_lens: per request, its tokens.

    Returns:
        None where fewer than `STEADY_STEPS` gaps of any request fall into that time.
    """
    begins = max(first_s)
    ends = min(first + sum(gaps) for first, gaps in zip(first_s, gaps_s, strict=True))
    rates = []
    for first, gaps, length in zip(first_s, gaps_s, output_lens, strict=True):
        times = [time for time in itertools.accumulate(gaps, initial=first) if begins <= time <= ends]
        if len(times) <= STEADY_STEPS:
            return None
        # From one token of this request to another, so that no part of a step is counted.
        tokens = (len(times) - 1) * (length - 1) / len(gaps)
        rates.append(tokens / (times[-1] - times[0]))
    return sum(rates)


def ratios(arms: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]], ours: str) -> list[dict[str, Any]]:
    """Compare `ours` with every other arm, load by load and metric by metric.

    The repeats of all arms alternate, so the n-th of one is compared with the n-th of the other: the machine was in
    the same mood. `ratio` is the median of those, `low` and `high` their range; above 1 we are better.
    """
    rows = []
    for against, theirs in arms.items():
        if against == ours:
            continue
        for load, ours_by_metric in arms[ours].items():
            for metric, our_values in ours_by_metric.items():
                their_values = theirs.get(load, {}).get(metric)
                if not their_values or not our_values:
                    continue
                more_is_better = METRICS.get(metric, False)
                pairs = list(zip(our_values, their_values, strict=False))
                each = [a / b if more_is_better else b / a for a, b in pairs]
                rows.append(
                    {
                        "load": load,
                        "metric": metric,
                        "ours": statistics.median(our_values),
                        "theirs": statistics.median(their_values),
                        "against": against,
                        "ratio": statistics.median(each),
                        "low": min(each),
                        "high": max(each),
                        "n": len(each),
                    }
                )
    return rows
