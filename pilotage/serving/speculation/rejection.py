"""Verifying drafts with vLLM's rejection sampler, whose four inner kernels it leaves to the platform.

The rule is that of Leviathan et al. (2211.17192): a draft stands with probability min(1, p / q), and what replaces a
rejected one is drawn from max(0, p - q). Without probabilities of the draft, q is 1 at the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

_MODULE = "vllm.v1.sample.rejection_sampler"


def register() -> None:
    """Give vLLM the kernels; it calls them where it would launch its own on an accelerator."""
    from vllm.triton_utils.dispatcher import register_kernels

    register_kernels(
        {
            f"{_MODULE}.rejection_greedy_sample_kernel": greedy,
            f"{_MODULE}.rejection_random_sample_kernel": random,
            f"{_MODULE}.expand_kernel": expand,
            f"{_MODULE}.sample_recovered_tokens_kernel": recovered,
        }
    )


def metadata(drafts: Sequence[Sequence[int]]) -> SpecDecodeMetadata:
    """Describe logits that lie request by request, those of its drafts first, then the one after them.

    Args:
        drafts: of each request, in the order of the batch.
    """
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    counts = torch.tensor([len(ids) for ids in drafts], dtype=torch.int32)
    ends = (counts + 1).cumsum(0, dtype=torch.int32)
    rows = torch.arange(int(ends[-1]), dtype=torch.int32)
    bonus = ends - 1
    verifying = torch.ones(len(rows), dtype=torch.bool)
    verifying[bonus.long()] = False
    return SpecDecodeMetadata(
        draft_token_ids=torch.tensor([token for ids in drafts for token in ids], dtype=torch.int32),
        num_draft_tokens=counts.tolist(),
        cu_num_draft_tokens=counts.cumsum(0, dtype=torch.int32),
        cu_num_sampled_tokens=ends,
        target_logits_indices=rows[verifying],
        bonus_logits_indices=bonus,
        logits_indices=rows,
    )


def _spans(ends: Tensor) -> list[tuple[int, int]]:
    stops = ends.tolist()
    return list(zip([0, *stops[:-1]], stops, strict=True))


def expand(
    output: Tensor, values: Tensor, ends: Tensor, replace_from: float, replace_to: float, MAX_NUM_TOKENS: int = 0
) -> None:
    """Repeat each request's value for each of its drafts, one value replaced by another."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).long()
    values = torch.where(values == replace_from, torch.as_tensor(replace_to, dtype=values.dtype), values)
    output.copy_(values.repeat_interleave(counts))


def greedy(
    output: Tensor,
    ends: Tensor,
    drafts: Tensor,
    best: Tensor,
    bonus: Tensor,
    is_greedy: Tensor | None,
    max_drafts: int,
    uniform: Tensor | None,
    rates: Tensor | None,
    SYNTHETIC_MODE: bool = False,
) -> None:
    """Keep drafts as long as they are the model's first choice; write its own choice where they stop being it.

    Args:
        output: [B, max_drafts + 1], -1 where nothing is written.
        ends: [B] where each request's drafts end.
        drafts, best: [D] drafted tokens, and the model's first choice in their places.
        bonus: [B, 1] the token after the last draft.
        is_greedy: [B]; None where every request is.
        max_drafts, uniform, rates, SYNTHETIC_MODE: of vLLM's own kernel; made-up acceptance rates are refused.
    """
    assert not SYNTHETIC_MODE
    for row, (start, stop) in enumerate(_spans(ends)):
        if is_greedy is not None and not is_greedy[row]:
            continue
        stands = drafts[start:stop] == best[start:stop]
        count = int(stands.long().cumprod(0).sum())
        written = min(count + 1, stop - start)
        output[row, :written] = best[start : start + written].to(output.dtype)
        if count == stop - start:
            output[row, count] = bonus[row].squeeze()


def random(
    output: Tensor,
    ends: Tensor,
    drafts: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    bonus: Tensor,
    replacements: Tensor,
    uniform: Tensor,
    is_greedy: Tensor,
    max_drafts: int,
    vocab_size: int,
    rates: Tensor | None,
    NO_DRAFT_PROBS: bool = False,
    SYNTHETIC_MODE: bool = False,
) -> None:
    """Keep drafts by chance, so that what comes out is distributed as without drafts.

    Args:
        output, ends, drafts, bonus, is_greedy: as for `greedy`.
        draft_probs: [D, V], or None where a draft was certain.
        target_probs: [D, V].
        replacements: [D] the token to write where a draft is rejected; see `recovered`.
        uniform: [D] in [0, 1).
        max_drafts, vocab_size, rates, NO_DRAFT_PROBS, SYNTHETIC_MODE: of vLLM's own kernel.
    """
    assert not SYNTHETIC_MODE
    at = drafts.long().clamp(min=0)[:, None]
    target = target_probs.gather(1, at)[:, 0]
    drafted = torch.ones_like(target) if draft_probs is None else draft_probs.gather(1, at)[:, 0]
    stands = (drafts >= 0) & (drafted > 0) & (target / drafted >= uniform)
    for row, (start, stop) in enumerate(_spans(ends)):
        if is_greedy[row]:
            continue
        count = int(stands[start:stop].long().cumprod(0).sum())
        output[row, :count] = drafts[start : start + count].to(output.dtype)
        output[row, count] = bonus[row].squeeze() if count == stop - start else replacements[start + count]


def recovered(
    output: Tensor,
    ends: Tensor,
    drafts: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    inverse: Tensor,
    vocab_size: int,
    BLOCK_SIZE: int = 0,
    NO_DRAFT_PROBS: bool = False,
    USE_FP64_GUMBEL: bool = False,
) -> None:
    """Draw what replaces each draft if it is rejected.

    Args:
        output: [D].
        ends, drafts, draft_probs, target_probs: as for `random`.
        inverse: [B, V] 1 / exponential noise; the largest product with a distribution is a draw from it.
        vocab_size, BLOCK_SIZE, NO_DRAFT_PROBS, USE_FP64_GUMBEL: of vLLM's own kernel.
    """
    output, drafts = output.view(-1), drafts.flatten()
    for row, (start, stop) in enumerate(_spans(ends)):
        if start == stop:
            continue
        if draft_probs is None:
            left = target_probs[start:stop].clone()
            at = drafts[start:stop].long()
            real = at >= 0
            left[real.nonzero()[:, 0], at[real]] = 0.0
        else:
            left = (target_probs[start:stop] - draft_probs[start:stop]).clamp(min=0)
        output[start:stop] = (left * inverse[row]).argmax(-1).to(output.dtype)
