"""The observer proof: does a model say the same with its taps as without them?

One prefill and one decode step are run in both kinds of graphs on the same tokens, with nothing replaced, and what
comes out is compared. Taps can change how the compiler fuses, so the answer is a number, not a promise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pilotage.serving.batch import Forward, StepInputs

if TYPE_CHECKING:
    from torch import Tensor

    from pilotage.probe.plan import Taps
    from pilotage.serving.graphs import Graphs

_TOKENS = 48


def prove(graphs: Graphs, taps: Taps | None) -> dict[str, Any]:
    """Compare the smallest prefill and decode graphs with and without taps.

    Pages that this needs are put back as they were, so it may run between two steps of a server.

    Args:
        graphs: `graphs.taps` does not matter.
        taps: the taps in question.

    Returns:
        For "prefill" and "decode" whether logits and final hidden states are `bitwise` equal, and where not
        `max_abs`, the largest difference of a logit, and `relative_rms`, the difference of the logits over their own
        size. {"not_measured": reason} where there are too few pages.
    """
    prefill = graphs.inputs[graphs.reach.keys("prefill", graphs.token_buckets[0])[-1]]
    decode = graphs.inputs[graphs.reach.keys("decode", graphs.seq_buckets[0])[-1]]
    count = min(_TOKENS, prefill.size, *(group.block_size * group.max_blocks_per_seq - 1 for group in prefill.groups))
    pages = [-(-(count + 1) // group.block_size) for group in prefill.groups]
    have = min(pair[0].shape[0] for pair in graphs.caches.values())
    if count < 1 or sum(pages) + 1 > have:  # page 0 is vLLM's own
        return {"not_measured": f"{sum(pages) + 1} pages are needed and there are {have}"}
    if taps is not None:
        taps.leave_live()
    before = graphs.taps
    try:
        graphs.taps = None
        graphs.prepare([prefill.key, decode.key])
        plain = _steps(graphs, prefill, decode, count, pages)
        graphs.taps = taps
        graphs.prepare([prefill.key, decode.key])
        tapped = _steps(graphs, prefill, decode, count, pages)
    finally:
        graphs.taps = before
    return {kind: _compare(plain[kind], tapped[kind]) for kind in plain}


def _steps(
    graphs: Graphs, prefill: StepInputs, decode: StepInputs, count: int, pages: list[int]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Run a prompt of `count` tokens and one more; returns (logits, hidden states) of the real rows."""
    held = [(cache, cache[: sum(pages) + 1].clone()) for pair in graphs.caches.values() for cache in pair]
    vocabulary = graphs.vllm_config.model_config.get_vocab_size()
    token_ids = ((np.arange(count + 1, dtype=np.int64) * 7919 + 13) % vocabulary).astype(np.int32)[None]
    tables = []
    first = 1
    for group, needed in zip(prefill.groups, pages, strict=True):
        table = np.zeros((1, group.max_blocks_per_seq), dtype=np.int32)
        table[0, :needed] = np.arange(first, first + needed)
        first += needed
        tables.append(table)
    found = {}
    try:
        for inputs, done, new in ((prefill, 0, count), (decode, count, 1)):
            inputs.fill(
                Forward(kind=inputs.kind, rows=(0,), num_tokens=(new,)),
                token_ids=token_ids,
                num_computed=np.array([done], dtype=np.int32),
                block_tables=tables,
            )
            logits, hidden = graphs.run(inputs)
            found[inputs.kind] = (logits[:1].float().clone(), hidden[:new].float().clone())
            inputs.clear()
    finally:
        for cache, value in held:
            cache[: len(value)].copy_(value)
    return found


def _compare(plain: tuple[Tensor, Tensor], tapped: tuple[Tensor, Tensor]) -> dict[str, Any]:
    difference = tapped[0] - plain[0]
    return {
        "bitwise": all(torch.equal(a, b) for a, b in zip(plain, tapped, strict=True)),
        "max_abs": float(difference.abs().max()),
        "relative_rms": float(difference.pow(2).mean().sqrt() / plain[0].pow(2).mean().sqrt()),
    }
