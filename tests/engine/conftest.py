"""The oracle: Hugging Face in fp32, one prompt at a time, greedy; and how tokens are held against it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

# Before vllm is imported anywhere: the engine lives in the test's process.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

TIE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Greedy continuation of one prompt.

    Attributes:
        tokens: the continuation. gaps: difference of the two largest logits at each of its tokens.
        logits: [prompt + continuation - 1, V], raw, fp32.
    """

    tokens: list[int]
    gaps: list[float]
    logits: torch.Tensor


class Oracle:
    """Hugging Face's own model of a checkpoint."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        # Hugging Face's sdpa attention knows no bound on the scores, which Gemma 2 has; experts run one by one.
        attention = "eager" if "gemma2" in path.name else None
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation=attention, experts_implementation="eager"
        ).eval()

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], count: int) -> Reference:
        tokens = list(prompt)
        cache: Any = None
        new = tokens
        rows = []
        for _ in range(count):
            out = self.model(torch.tensor([new]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits[0].float())
            new = [int(out.logits[0, -1].argmax())]
            tokens += new
        last = torch.stack([row[-1] for row in rows]).topk(2).values
        return Reference(tokens=tokens[len(prompt) :], gaps=(last[:, 0] - last[:, 1]).tolist(), logits=torch.cat(rows))

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.model(torch.tensor([list(tokens)])).logits[0].float()


def disagreement(ours: Sequence[int], reference: Reference) -> str | None:
    """Return None where the tokens are equal, or equal up to a tie; else what differs."""
    assert len(ours) == len(reference.tokens)
    for index, (mine, theirs, gap) in enumerate(zip(ours, reference.tokens, reference.gaps, strict=True)):
        if mine != theirs:
            if gap < TIE:
                print(f"tie at output token {index}: the top two logits are {gap:.2e} apart")
                return None
            return f"output token {index} is {mine}, not {theirs} (gap {gap:.3g})"
    return None


def prompts_of(lengths: Sequence[int], seed: int, vocab: int = 320) -> list[list[int]]:
    """Return random prompts of the given lengths, clear of special ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, vocab - 5, (n,), generator=generator).tolist() for n in lengths]


def generate(llm: Any, prompts: Sequence[Sequence[int]], count: int, **sampling: Any) -> list[Any]:
    """Run prompts to exactly `count` tokens, greedily unless told otherwise; returns vLLM's request outputs."""
    from vllm import SamplingParams

    params = SamplingParams(**{"max_tokens": count, "temperature": 0.0, "ignore_eos": True, **sampling})
    requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return list(llm.generate(requests, params, use_tqdm=False))


def tokens_of(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def check_tokens(outputs: Sequence[Any], references: Sequence[Reference]) -> None:
    """Fail with every disagreement between the engine's tokens and the oracle's."""
    found = {
        index: text
        for index, (ours, reference) in enumerate(zip(tokens_of(outputs), references, strict=True))
        if (text := disagreement(ours, reference)) is not None
    }
    assert not found, found


@pytest.fixture(scope="session")
def oracle() -> Any:
    """Oracles by checkpoint, loaded once."""
    known: dict[Path, Oracle] = {}

    def get(path: Path) -> Oracle:
        if path not in known:
            known[path] = Oracle(path)
        return known[path]

    return get
