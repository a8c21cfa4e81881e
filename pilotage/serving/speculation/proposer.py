"""What proposes drafts, chosen by vLLM's `speculative_config`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from pilotage.core.errors import Unsupported
from pilotage.serving.speculation.ngram import Ngram

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

DRAFTS_KEY = "pilotage_drafts"
METHODS = ("ngram",)


class Proposer(Protocol):
    """Guesses the next tokens of requests."""

    def propose(self, batch: InputBatch, rows: Sequence[int]) -> list[list[int]]:
        """Return drafts for every row of the batch; none for those that are not in `rows`."""


def named(state: CachedRequestState, count: int) -> list[int] | None:
    """Return the drafts that the request itself names for now, at most `count`; None where it names none at all.

    `extra_args["pilotage_drafts"]` lists them by the number of output tokens so far. Whatever is drafted, the output
    is distributed as without drafts: this is for tests of the verification, and for callers who know what comes next.
    """
    drafts = ((state.sampling_params.extra_args if state.sampling_params else None) or {}).get(DRAFTS_KEY)
    if drafts is None:
        return None
    number = len(state.output_token_ids)
    return list(drafts[number])[: max(count, 0)] if number < len(drafts) else []


def tokens_per_req(vllm_config: VllmConfig) -> int:
    """Return the most tokens of a request in a decode graph: its last token and the drafts after it."""
    speculative = vllm_config.speculative_config
    return 1 if speculative is None else 1 + int(speculative.num_speculative_tokens)


def require_supported(vllm_config: VllmConfig) -> None:
    """Raise where a configured way of speculating is not one of ours.

    Raises:
        Unsupported: another method, or drafts accepted by another rule than the exact one.
    """
    speculative = vllm_config.speculative_config
    if speculative is None:
        return
    if speculative.method not in METHODS:
        raise Unsupported(
            f"speculative decoding by {speculative.method!r} is not implemented on this target",
            where="speculative_config.method",
            do=f"use {' or '.join(METHODS)}",
        )
    if speculative.rejection_sample_method != "standard":
        raise Unsupported(
            f"rejection_sample_method={speculative.rejection_sample_method!r} is not implemented on this target",
            where="speculative_config",
            do="remove it: drafts are then accepted so that the distribution stays the model's own",
        )


def proposer(vllm_config: VllmConfig) -> Proposer | None:
    """Build what proposes drafts; None without speculation."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return None
    require_supported(vllm_config)
    assert speculative.prompt_lookup_min is not None and speculative.prompt_lookup_max is not None
    return Ngram(
        count=speculative.num_speculative_tokens,
        shortest=speculative.prompt_lookup_min,
        longest=speculative.prompt_lookup_max,
        max_model_len=vllm_config.model_config.max_model_len,
    )
