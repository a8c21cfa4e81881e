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

from pilotage.accuracy.arms.base import LayerKV, Stream
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

    Experts run as the modelling file has them, one after another: the grouped product that transformers prefers refuses
    sizes that are not multiples of 16 bytes.

    Args:
        path: the checkpoint.
        dtype: dtype of the parameters and of the computation.
        attention: "sdpa" or "eager", see `attention_of`.
        rounded_to: round the weights to this dtype first; the reference of a converted checkpoint.

    Raises:
        Unsupported: transformers has no causal language model for it.
        BadInput: the checkpoint cannot be loaded, or lacks tensors.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with quiet():
        try:
            loader: Any = AutoModelForCausalLM
            model, info = loader.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation=attention_of(AutoConfig.from_pretrained(path), attention),
                experts_implementation="eager",
                output_loading_info=True,
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


def attention_of(config: Any, wanted: str) -> str:
    """Return the attention implementation of transformers that plays a part for a model.

    Two parts are needed: "sdpa", what the reference runs, and "eager", the same in another order of sums. Where
    transformers' sdpa would leave bounds on the scores or sinks out, the reference is the modelling file's own eager
    code, and the other one is `grouped_attention`.

    Args:
        config: of the model.
        wanted: "sdpa" or "eager".
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    # Several classes for one config, or none, would not have been loaded.
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    bounded = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    if not bounded and (known is None or getattr(known, "_supports_sdpa", True)):
        return wanted
    if wanted == "sdpa":
        return "eager"
    _register_grouped()
    return GROUPED


def set_attention(model: Any, wanted: str) -> None:
    """Switch a loaded model to the implementation that plays the part `wanted`; see `attention_of`."""
    model.set_attn_implementation(attention_of(model.config, wanted))


GROUPED = "pilotage_grouped"


def _register_grouped() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if GROUPED not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        ALL_ATTENTION_FUNCTIONS.register(GROUPED, grouped_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(GROUPED, eager_mask)


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend like transformers' eager functions, in fp32 and without repeating keys and values.

    Args:
        module: not looked at.
        query: [B, N, S, H].
        key, value: [B, K, S, H].
        attention_mask: [B, 1, S, S], added to the scores, or None.
        scaling: factor on q.k.
        dropout: not applied; arms do not train.
        softcap: bound of the scores.
        s_aux: [N] sinks.

    Returns:
        [B, S, N, H], and None for the weights.
    """
    batch, heads, rows, size = query.shape
    grouped = query.float().view(batch, key.shape[1], -1, rows, size)
    scores = torch.einsum("bkgqh,bksh->bkgqs", grouped, key.float()) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is not None:
        scores = scores + attention_mask[:, :, None, :, : key.shape[2]].float()
    top = scores.amax(-1, keepdim=True)
    sinks = None if s_aux is None else s_aux.float().view(1, key.shape[1], -1, 1, 1)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    out = torch.einsum("bkgqs,bksh->bkgqh", weights, value.float()) / total
    return out.view(batch, heads, rows, size).transpose(1, 2).to(query.dtype).contiguous(), None


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


@torch.inference_mode()
def generate(model: Any, ids: Any, steps: int) -> tuple[Tensor, Tensor]:
    """Continue a batch greedily, one prompt at a time: no padding, so no mask that could be wrong.

    Args:
        model: from `load`.
        ids: [batch, prompt] tokens, or a list of lists.
        steps: tokens to generate; end-of-sequence tokens do not stop it.

    Returns:
        Logits [steps, batch, V] in fp32, and the generated tokens [batch, steps].
    """
    columns, said = [], []
    for prompt in ids:
        step = model(input_ids=torch.tensor([[int(token) for token in prompt]]), use_cache=True, logits_to_keep=1)
        rows, tokens = [step.logits[0, -1].float()], [int(step.logits[0, -1].argmax())]
        while len(tokens) < steps:
            step = model(input_ids=torch.tensor([tokens[-1:]]), use_cache=True, past_key_values=step.past_key_values)
            rows.append(step.logits[0, -1].float())
            tokens.append(int(step.logits[0, -1].argmax()))
        columns.append(torch.stack(rows))
        said.append(tokens)
    return torch.stack(columns, 1), torch.tensor(said)


@torch.inference_mode()
def forced(model: Any, ids: Any, tokens: Tensor) -> Tensor:
    """Return the logits [steps, batch, V] of the steps that say `tokens` [steps, batch] after the prompts `ids`."""
    columns = []
    for row, prompt in enumerate(ids):
        stream = [int(token) for token in prompt] + tokens[:-1, row].tolist()
        keep = torch.arange(len(prompt) - 1, len(stream))
        step = model(input_ids=torch.tensor([stream]), use_cache=False, logits_to_keep=keep)
        columns.append(step.logits[0].float())
    return torch.stack(columns, 1)


@torch.inference_mode()
def keys_values(model: Any, stream: Stream, *, chunk: int | None = None) -> list[LayerKV]:
    """Return keys and values of every layer at all positions of a stream but the last, which is never an input.

    Args:
        model: from `load`.
        stream: what it follows.
        chunk: tokens to feed at a time; None for all of them.
    """
    from transformers import DynamicCache

    end = len(stream.tokens) - 1
    starts = list(range(0, end, chunk or end))
    # Made without the config every layer keeps all positions; windows are then the mask's business alone.
    cache: Any = DynamicCache()
    for start, stop in zip(starts, [*starts[1:], end], strict=True):
        # The decoder alone: the head is most of the work, and no part of the cache.
        model.get_decoder()(input_ids=torch.tensor([stream.tokens[start:stop]]), use_cache=True, past_key_values=cache)
    # Of latent attention transformers keeps the latents as keys and the rotated channels as values; a page of ours
    # holds both in one row, which attention reads as key and as value.
    latent = getattr(model.config.get_text_config(), "kv_lora_rank", None) is not None
    found = []
    for index, layer in enumerate(cache.layers):
        keys, values = (x[0].transpose(0, 1).float() for x in (layer.keys, layer.values))
        if latent:
            keys = values = torch.cat((keys, values), dim=-1)
        found.append(LayerKV(layer=f"layers.{index}.self_attn", first=0, keys=keys, values=values))
    return found
