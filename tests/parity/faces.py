"""A tiny checkpoint twice for training: in transformers, and as our training face."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pilotage.models import registry

NAMES = (
    *("llama3", "qwen2", "qwen3", "gemma3", "gemma2", "gemma4"),
    *("mistral", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"),
)
# Hugging Face's sdpa attention knows neither a bound on the scores nor sinks.
EAGER_ONLY = ("gemma2", "gpt_oss")


def hf_face(path: Path, dtype: torch.dtype = torch.float32, attention: str | None = None, **config: Any) -> Any:
    """The transformers model of a checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if attention is None and AutoConfig.from_pretrained(path).model_type in EAGER_ONLY:
        attention = "eager"
    options = {} if attention is None else {"attn_implementation": attention}
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, experts_implementation="eager", **options, **config
    ).train()


def our_face(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Our training face of a checkpoint."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    return registry.training_class(config.architectures).from_pretrained(path, dtype=dtype, **options).train()


def batch(pad_id: int | None, *, left: int = 9, right: int = 7, length: int = 50) -> dict[str, Tensor]:
    """Three rows, one padded on the left, one on the right, longer than three windows."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 320, (3, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :left] = 0
    mask[1, length - right :] = 0
    if pad_id is not None:
        ids = ids.masked_fill(mask == 0, pad_id)
    # Nothing predicts the first token after padding: a row of padding sees what its implementation likes.
    unpredicted = (mask == 0) | (torch.cat((torch.zeros(3, 1), mask[:, :-1]), dim=1) == 0)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(unpredicted, -100)}


def packed(lengths: tuple[int, ...] = (23, 5, 22)) -> dict[str, Any]:
    """Several sequences in one row, told apart by their positions alone."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(5, 320, (1, sum(lengths)), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    labels = ids.masked_fill(positions == 0, -100)
    # With a cache transformers takes the row for one sequence.
    return {"input_ids": ids, "position_ids": positions, "labels": labels, "use_cache": False}


def gradients(model: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """Run forward and backward; the output, and every parameter's gradient."""
    model.zero_grad(set_to_none=True)
    output = apart(model, given) if "use_cache" in given and mixes_packed(model) else model(**given)
    output.loss.backward()
    return output, {
        name: copy.copy(parameter.grad) for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def mixes_packed(model: Any) -> bool:
    """Whether this is the class of transformers that lets packed sequences see one another."""
    return type(model).__module__ == "transformers.models.gpt_oss.modeling_gpt_oss"


def apart(model: Any, given: dict[str, Any]) -> Any:
    """Run packed sequences one after another; logits and loss as of the packed row."""
    starts = (given["position_ids"][0] == 0).nonzero()[:, 0].tolist()
    cuts = [slice(a, b) for a, b in zip(starts, [*starts[1:], None], strict=True)]
    count = (given["labels"][:, 1:] != -100).sum()
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    outputs = [
        model(**{name: value[:, cut] for name, value in tensors.items()}, use_cache=False, num_items_in_batch=count)
        for cut in cuts
    ]
    logits = torch.cat([output.logits for output in outputs], dim=1)
    return SimpleNamespace(logits=logits, loss=torch.stack([output.loss for output in outputs]).sum())
