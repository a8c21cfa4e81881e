"""What proposes drafts, chosen by vLLM's `speculative_config`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pilotage.core.errors import Unsupported
from pilotage.parallel import ParallelLayout
from pilotage.serving.speculation.ngram import Ngram

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

    from pilotage.serving.speculation.choice import Choice

DRAFTS_KEY = "pilotage_drafts"
METHODS = ("ngram", "draft_model", "eagle3")


class Proposer(Protocol):
    """Guesses the next tokens of requests.

    Attributes:
        choice: how a model's drafts are chosen, and the probabilities that they had; None where nothing is drawn.
    """

    choice: Choice | None

    def propose(self, batch: InputBatch, rows: Sequence[int]) -> list[list[int]]:
        """Return drafts for every row of the batch; none for those that are not in `rows`."""

    def observe(
        self, req_ids: Sequence[str], counts: Sequence[int], computed: Sequence[int], aux_hidden_states: Tensor
    ) -> None:
        """Take the hidden states of a forward, where the served model hands them out; see `eagle3.Eagle3.observe`."""

    def warm_up(self) -> float:
        """Get ready; returns the seconds spent."""


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


def needs_model(vllm_config: VllmConfig) -> bool:
    """Tell whether a second model is to be loaded."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method in ("draft_model", "eagle3")


def load(vllm_config: VllmConfig, target: Any) -> Any | None:
    """Load the second model, where the method has one.

    Args:
        vllm_config: of the served model.
        target: the served model; an EAGLE3 head tells it which hidden states to hand out.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or not needs_model(vllm_config):
        return None
    from pilotage.serving import loading
    from pilotage.serving.speculation.lanes import config_of_draft

    own, device = config_of_draft(vllm_config), next(target.parameters()).device
    if speculative.method == "draft_model":
        return loading.load_model(own, device=device)[0]
    from pilotage.models.eagle3 import weights

    return weights.load(
        loading.checkpoint(own.model_config.model), target, dtype=vllm_config.model_config.dtype, device=device
    )


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
    if speculative.method == "draft_model":
        _require_same_vocabulary(vllm_config)
    if needs_model(vllm_config):
        _require_drafter(vllm_config)
    if speculative.method == "eagle3":
        _require_hidden_states(vllm_config)
    if speculative.method == "ngram" and speculative.draft_sample_method != "greedy":
        raise Unsupported(
            f"draft_sample_method={speculative.draft_sample_method!r} for n-grams, which have no probabilities",
            where="speculative_config",
            do="remove it",
        )
    if speculative.rejection_sample_method != "standard":
        raise Unsupported(
            f"rejection_sample_method={speculative.rejection_sample_method!r} is not implemented on this target",
            where="speculative_config",
            do="remove it: drafts are then accepted so that the distribution stays the model's own",
        )


def _require_hidden_states(vllm_config: VllmConfig) -> None:
    """Raise where the served model hands out no hidden states for a head."""
    from pilotage.serving import layout, loading

    architectures = vllm_config.model_config.architectures
    factory = loading.find_factory(architectures)
    if factory is None or not getattr(factory, "supports_eagle3", False):
        reason = "has no model package" if factory is None else "does not hand out the hidden states of its layers"
        raise Unsupported(
            f"{', '.join(architectures)} {reason}, which an EAGLE3 head continues",
            where="speculative_config.method",
            do="use ngram or draft_model; Llama 3 and Qwen 3 take a head",
        )
    if layout.parallel_layout(vllm_config) != ParallelLayout():
        raise Unsupported(
            "an EAGLE3 head beside replicated or dealt-out components is not implemented",
            where="speculative_config.method",
            do="remove the component sizes",
        )


def _require_same_vocabulary(vllm_config: VllmConfig) -> None:
    """Raise where a draft model does not go with the served one."""
    speculative, served = vllm_config.speculative_config, vllm_config.model_config
    assert speculative is not None
    where = "speculative_config"
    ours, drafts = served.get_vocab_size(), speculative.draft_model_config.get_vocab_size()
    if ours != drafts:
        raise Unsupported(
            f"the draft model has {drafts} tokens, the served one {ours}", where=where, do="use one of the same family"
        )


def _require_drafter(vllm_config: VllmConfig) -> None:
    """Raise where a second model cannot run beside the served one."""
    speculative, served = vllm_config.speculative_config, vllm_config.model_config
    assert speculative is not None
    where = "speculative_config"
    ranks, draft_ranks = (
        config.tensor_parallel_size for config in (vllm_config.parallel_config, speculative.draft_parallel_config)
    )
    if ranks != draft_ranks:
        raise Unsupported(
            f"draft_tensor_parallel_size={draft_ranks} beside {ranks} ranks", where=where, do=f"make it {ranks}"
        )
    if served.enable_prompt_embeds:
        raise Unsupported("a draft model cannot read prompt embeddings", where=where, do="remove enable_prompt_embeds")


def proposer(vllm_config: VllmConfig, draft_model: Any, **sizes: Any) -> Proposer | None:
    """Build what proposes drafts; None without speculation.

    Args:
        vllm_config: of the served model.
        draft_model: loaded; None where the method needs none.
        sizes: of `draft.DraftModel` and `eagle3.Eagle3`.
    """
    speculative = vllm_config.speculative_config
    if speculative is None:
        return None
    require_supported(vllm_config)
    if needs_model(vllm_config):
        from pilotage.serving.speculation.choice import Choice
        from pilotage.serving.speculation.draft import DraftModel
        from pilotage.serving.speculation.eagle3 import Eagle3

        choice = Choice(drawn=speculative.draft_sample_method == "probabilistic")
        kind = Eagle3 if speculative.method == "eagle3" else DraftModel
        return kind(draft_model, vllm_config, choice, **sizes)
    assert speculative.prompt_lookup_min is not None and speculative.prompt_lookup_max is not None
    return Ngram(
        count=speculative.num_speculative_tokens,
        shortest=speculative.prompt_lookup_min,
        longest=speculative.prompt_lookup_max,
        max_model_len=vllm_config.model_config.max_model_len,
    )
