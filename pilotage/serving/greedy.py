"""Greedy continuations from a running engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm import LLM


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """What the engine said after a prompt.

    Attributes:
        tokens: ids of the new tokens, the end-of-sequence token included.
        text: the same as text; empty without a tokenizer.
    """

    tokens: tuple[int, ...]
    text: str


def greedy(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    detokenize: bool = True,
    ignore_eos: bool = False,
) -> list[Continuation]:
    """Continue all prompts as one batch with the most likely tokens.

    Args:
        llm: a running engine.
        prompts: token ids.
        new_tokens: at most so many for each; an end-of-sequence token stops earlier.
        detokenize: False where the engine has no tokenizer.
        ignore_eos: go on after an end-of-sequence token.
    """
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, detokenize=detokenize, ignore_eos=ignore_eos)
    outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False)
    return [
        Continuation(tokens=tuple(output.outputs[0].token_ids), text=output.outputs[0].text or "") for output in outputs
    ]
