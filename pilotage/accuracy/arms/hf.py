"""Hugging Face arms: the reference in fp32, the baseline in the serving dtype, and clean variants of both.

A model is judged by what Hugging Face's own code computes from the same checkpoint, so nothing here goes through the
loader or the operators under test.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from pilotage.accuracy.arms.base import Stream
from pilotage.core.errors import BadInput, Unsupported
from pilotage.core.nouns import Observation

Mode = Literal["whole", "cached", "chunked"]
# No multiple of a block or window size; longer ones for long prompts, where each chunk is a forward of its own.
CHUNK = 27
CHUNKS = 5


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the loading bars and advice of transformers."""
    from transformers.utils import logging as hf_logging

    verbosity = hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.ERROR)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


def load(path: Path, dtype: torch.dtype, *, attention: str = "sdpa", rounded_to: torch.dtype | None = None) -> Any:
    """Load the causal language model of a checkpoint directory on the CPU, ready for inference.

    Args:
        path: the checkpoint.
        dtype: dtype of the parameters and of the computation.
        attention: transformers' `attn_implementation`.
        rounded_to: round the weights to this dtype first; the reference of a converted checkpoint.

    Raises:
        Unsupported: transformers has no causal language model for it.
        BadInput: the checkpoint cannot be loaded, or lacks tensors.
    """
    from transformers import AutoModelForCausalLM

    with quiet():
        try:
            loader: Any = AutoModelForCausalLM
            model, info = loader.from_pretrained(
                path, dtype=dtype, attn_implementation=attention, output_loading_info=True
            )
        except ValueError as error:
            raise Unsupported(f"transformers refuses it: {_last_line(error)}", where=str(path)) from error
        except (OSError, RuntimeError) as error:
            raise BadInput(f"cannot be loaded: {_last_line(error)}", where=str(path)) from error
    missing = sorted(info["missing_keys"])
    if missing:
        # transformers would fill these with random numbers and go on.
        raise BadInput(f"the checkpoint has no {missing[0]} ({len(missing)} tensors missing)", where=str(path))
    if rounded_to is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(rounded_to))
    model.eval().requires_grad_(False)
    return model


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


class HFArm:
    """A Hugging Face model as an arm.

    Args:
        model: from `load`.
        name: of the arm.
        mode: "whole" computes a stream in one forward without a cache; "cached" prefills the prompt and then feeds the
            continuation token by token through Hugging Face's KV cache; "chunked" feeds the whole
            stream in chunks.
    """

    def __init__(self, model: Any, name: str, *, mode: Mode = "whole") -> None:
        self.model = model
        self.name = name
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.mode = mode

    @torch.inference_mode()
    def observe(self, streams: Sequence[Stream]) -> Observation:
        """See `Arm.observe`."""
        rows = self._whole if self.mode == "whole" else self._cached
        return Observation(
            arm=self.name,
            dtype=self.dtype,
            logits=[rows(stream) for stream in streams],
            positions=[list(stream.positions) for stream in streams],
        )

    def _whole(self, stream: Stream) -> Tensor:
        ids = torch.tensor([stream.tokens[: stream.positions[-1] + 1]])
        keep = torch.tensor(stream.positions)
        return self.model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits[0].float()

    def _cached(self, stream: Stream) -> Tensor:
        end = stream.positions[-1] + 1
        if self.mode == "chunked":
            starts = list(range(0, end, max(CHUNK, stream.prompt // CHUNKS)))
        else:
            starts = [0, *range(stream.prompt, end)]
        rows: list[Tensor] = []
        cache = None
        for start, stop in zip(starts, [*starts[1:], end], strict=True):
            wanted = [p - start for p in stream.positions if start <= p < stop]
            step = self.model(
                input_ids=torch.tensor([stream.tokens[start:stop]]),
                use_cache=True,
                past_key_values=cache,
                logits_to_keep=torch.tensor(wanted) if wanted else 1,
            )
            cache = step.past_key_values
            if wanted:
                rows.append(step.logits[0].float())
        return torch.cat(rows)


@torch.inference_mode()
def greedy(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[tuple[int, ...]]:
    """Continue each prompt with the model's most likely tokens; end-of-sequence tokens do not stop it.

    Returns:
        For each prompt the prompt and `new_tokens` more tokens.
    """
    streams = []
    for prompt in prompts:
        tokens = list(prompt)
        step = model(input_ids=torch.tensor([tokens]), use_cache=True, logits_to_keep=1)
        for index in range(new_tokens):
            token = int(step.logits[0, -1].argmax())
            tokens.append(token)
            if index + 1 < new_tokens:
                step = model(input_ids=torch.tensor([[token]]), use_cache=True, past_key_values=step.past_key_values)
        streams.append(tuple(tokens))
    return streams
