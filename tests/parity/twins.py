"""A tiny checkpoint twice: in transformers, and as our model with its pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pilotage.models import registry
from pilotage.models.common.paging import PagedSession

NAMES = (
    *("llama3", "qwen2", "qwen3", "gemma3", "gemma2", "gemma4"),
    *("mistral", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"),
)
# Hugging Face's sdpa attention knows neither a bound on the scores nor sinks.
EAGER_ONLY = ("gemma2", "gpt_oss")
ATTENTION = ("flash_attention", "segmented_attention", "attention_decode", "write_kv")
BLOCK_SIZE = 4


def hf_model(path: Path, dtype: torch.dtype = torch.float32, attention: str | None = None) -> Any:
    """The transformers model of a checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if attention is None:
        attention = "eager" if AutoConfig.from_pretrained(path).model_type in EAGER_ONLY else "sdpa"
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=attention, experts_implementation="eager"
    ).eval()


def our_model(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Our model of a checkpoint, built on the meta device and loaded, as the worker does it."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    entry = registry.find(config.architectures)
    assert entry is not None
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = entry.load().from_configs(config)
    finally:
        torch.set_default_dtype(before)
    model.load_weights(path)
    return model


def prompts(lengths: Sequence[int], vocab_size: int = 320, seed: int = 0) -> list[list[int]]:
    """Random token streams."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def hf_logits(model: Any, streams: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits [length, V] of each stream, one at a time, without a cache."""
    return [model(torch.tensor([list(stream)]), use_cache=False).logits[0] for stream in streams]


def paged_logits(
    session: PagedSession,
    streams: Sequence[Sequence[int]],
    *,
    decoded: int = 5,
    chunk: int | None = None,
    bucket: int = 160,
    **options: Any,
) -> list[Tensor]:
    """Logits of each stream through the pages: prompts packed in one step (or in chunks), then decode steps.

    Args:
        session: fresh.
        streams: one per request.
        decoded: tokens at the end of each stream that are fed one at a time.
        chunk: most prompt tokens of a request in one step; None for all.
        bucket: padding of prefill steps.
        options: of `build_metadata` in prefill steps.
    """
    parts: list[list[Tensor]] = [[] for _ in streams]
    ends = [len(stream) - decoded for stream in streams]
    while any(len(session.history[r]) < end for r, end in enumerate(ends)):
        new = {}
        for r, stream in enumerate(streams):
            at = len(session.history[r])
            if at < ends[r]:
                new[r] = stream[at : min(ends[r], at + chunk) if chunk else ends[r]]
        for r, logits in session.step(new, bucket=bucket, **options).items():
            parts[r].append(logits)
    order = list(range(len(streams)))
    for step in range(decoded):
        order = order[1:] + order[:1]  # rows of a batch move between steps
        new = {r: [streams[r][ends[r] + step]] for r in order}
        for r, logits in session.step(new, bucket=session.num_requests, decode=True).items():
            parts[r].append(logits)
    return [torch.cat(part) for part in parts]
