"""Faults that only drafts show: their positions, pages and rows, what of them counts, and which tokens they become."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pilotage.accuracy.faults.fault import Fault, Patch, Plant, fills, method, sees
from pilotage.accuracy.faults.table.masks import of_the_last

_drafts = partial(Fault, heading="Speculation", only="speculation", subject="drafts")
CACHE = ("*.self_attn.kv", "*.self_attn.heads")
ROPE = ("*.self_attn.q_rope", "*.self_attn.k_rope")
HEADS = ("*.self_attn.heads",)
SAMPLER, RUNNER = ("sampler",), ("runner",)


def _is_draft(inputs: Any) -> Tensor:
    """Say which tokens [T] of a verifying step come after their request's first one."""
    real = torch.arange(inputs.size) < int(inputs.query_start_loc[-1])
    first = inputs.query_start_loc[:-1].unique()
    return real.index_fill(0, first[first < inputs.size].long(), False)


def _verifying(change: Callable[[Any, Tensor], None]) -> Plant:
    def edit(inputs: Any, forward: Any) -> None:
        if inputs.verifies:
            change(inputs, _is_draft(inputs))

    return fills(edit)


def _late(inputs: Any, drafts: Tensor) -> None:
    inputs.positions[drafts] += 1


def _first_page(inputs: Any, drafts: Tensor) -> None:
    """Drafts that cross into another page are written to the one that was current before."""
    starts = inputs.query_start_loc[:-1].long().clamp(max=inputs.size - 1)
    for group, slots in zip(inputs.groups, inputs.slot_mappings, strict=True):
        page = slots[starts[inputs.token_to_req.long()]] // group.block_size
        slots[drafts] = (page * group.block_size + slots % group.block_size)[drafts]


def _not_written_again() -> Plant:
    """A slot that a draft has filled is taken for filled: what was rejected stays in it."""
    filled: list[set[int]] = []

    def change(inputs: Any, forward: Any) -> None:
        while len(filled) < len(inputs.slot_mappings):
            filled.append(set())
        drafts = _is_draft(inputs) if inputs.verifies else torch.zeros(inputs.size, dtype=torch.bool)
        for seen, slots in zip(filled, inputs.slot_mappings, strict=False):
            again = [t for t in range(inputs.size) if int(slots[t]) in seen and inputs.kind == "decode"]
            seen.difference_update(slots[~drafts].tolist())
            seen.update(slots[drafts].tolist())
            slots[again] = -1

    def plant(patch: Patch) -> None:
        filled.clear()
        fills(change)(patch)

    return plant


def _without_drafts(inputs: Any, drafts: Tensor) -> None:
    """Sequences are as long as without drafts."""
    counts = torch.bincount(inputs.token_to_req[drafts].long(), minlength=inputs.num_rows)
    inputs.seq_lens -= counts.to(inputs.seq_lens.dtype)


def _to_the_next(inputs: Any, drafts: Tensor) -> None:
    """The last draft of the first request is taken for the first token of the second."""
    starts = inputs.query_start_loc
    if inputs.num_rows > 1 and starts[2] > starts[1] and drafts[int(starts[1]) - 1]:
        starts[1] -= 1


def _requests() -> Any:
    from pilotage.serving.requests import Requests

    return Requests


def _all_stand(real: Any, self: Any, step: Any) -> Any:
    """The worker believes that a draft that fell counts as computed."""
    before = {
        req_id: (int(self.batch.num_computed_tokens_cpu[row]), len(self.batch.spec_token_ids[row]))
        for req_id, row in self.batch.req_id_to_index.items()
    }
    cached = step.scheduled_cached_reqs
    for index, req_id in enumerate(cached.req_ids):
        computed, drafts = before.get(req_id, (0, 0))
        now = cached.num_computed_tokens[index]
        if drafts and req_id not in cached.resumed_req_ids and computed < now < computed + 1 + drafts:
            cached.num_computed_tokens[index] = now + 1
    return real(self, step)


def _verification(change: Callable[[Any], None]) -> Plant:
    """Change what describes the rows of logits to vLLM's rejection sampler."""

    def plant(patch: Patch) -> None:
        from pilotage.serving import speculation

        real = speculation.metadata

        def metadata(drafts: Any) -> Any:
            found = real(drafts)
            change(found)
            return found

        patch.set(speculation, "metadata", metadata)

    return plant


def _bonus_of_the_first_draft(found: Any) -> None:
    found.bonus_logits_indices = (found.bonus_logits_indices - 1).clamp(min=0)


def _row_after(found: Any) -> None:
    found.target_logits_indices = found.target_logits_indices + 1


def _one_more(patch: Patch) -> None:
    """The first draft that fell is kept all the same."""
    from vllm.v1.sample import rejection_sampler

    real = rejection_sampler.rejection_sample

    def rejection_sample(draft_token_ids: Tensor, counts: Any, *rest: Any, **how: Any) -> Tensor:
        found = real(draft_token_ids, counts, *rest, **how).clone()
        start = 0
        for row, count in enumerate(counts):
            stand = int((found[row] >= 0).sum()) - 1
            if 0 <= stand < count and draft_token_ids[start + stand] >= 0:
                found[row, stand] = draft_token_ids[start + stand]
            start += count
        return found

    patch.set(rejection_sampler, "rejection_sample", rejection_sample)


def _nothing_where_a_draft_fell(patch: Patch) -> None:
    """A request whose first draft falls gets no token at all, and never comes further."""
    from vllm.v1.sample import rejection_sampler

    real = rejection_sampler.rejection_sample

    def rejection_sample(draft_token_ids: Tensor, counts: Any, *rest: Any, **how: Any) -> Tensor:
        found = real(draft_token_ids, counts, *rest, **how).clone()
        fell = (found >= 0).sum(-1) == 1
        found[fell & (torch.tensor(counts) > 0)] = -1
        return found

    patch.set(rejection_sampler, "rejection_sample", rejection_sample)


def _runner() -> Any:
    from pilotage.serving.runner import ModelRunner

    return ModelRunner


def _next_requests_rows(real: Any, self: Any, inputs: Any, *how: Any) -> Any:
    """Logits of a verifying step are handed to the sampler one row too late."""
    logits, places = real(self, inputs, *how)
    return (logits.roll(-1, 0) if inputs.verifies else logits), places


FAULTS = (
    _drafts(name="positions of drafts one late", model="gemma3", where=ROPE, plant=_verifying(_late)),
    _drafts(
        name="drafts that fell count as computed",
        model="llama3",
        where=RUNNER,
        plant=method(_requests, "update", _all_stand),
    ),
    _drafts(name="keys of a draft that fell stay and are read", model="qwen3", where=CACHE, plant=_not_written_again()),
    _drafts(
        name="drafts in a new page written to the old one", model="gemma2", where=CACHE, plant=_verifying(_first_page)
    ),
    _drafts(
        name="a draft's row sees the drafts after it",
        model="mistral",
        where=HEADS,
        plant=sees(of_the_last, phase="decode"),
    ),
    _drafts(
        name="length of sequences without their drafts",
        model="deepseek_v3",
        where=HEADS,
        plant=_verifying(_without_drafts),
    ),
    _drafts(name="a draft taken for the next request's", model="gpt_oss", where=HEADS, plant=_verifying(_to_the_next)),
    _drafts(
        name="token after the drafts from the row before",
        model="qwen2",
        where=SAMPLER,
        plant=_verification(_bonus_of_the_first_draft),
    ),
    _drafts(
        name="drafts judged by the row after theirs", model="qwen3_moe", where=SAMPLER, plant=_verification(_row_after)
    ),
    _drafts(name="the first draft that fell is kept", model="llama3", where=SAMPLER, plant=_one_more),
    _drafts(
        name="no token where the first draft fell", model="qwen3", where=SAMPLER, plant=_nothing_where_a_draft_fell
    ),
    _drafts(
        name="rows of logits one too late, where drafts are verified",
        model="mixtral",
        where=SAMPLER,
        plant=method(_runner, "_sampled", _next_requests_rows),
    ),
)
