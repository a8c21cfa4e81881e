"""The batches on which training is compared with Hugging Face, and one forward and backward over each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pilotage.accuracy.arms import hf
from pilotage.arch.spec import ArchSpec

IGNORED = -100
# Tokens of a row; with windows longer than that, half a window more than one, but not more than the second.
LENGTH = 50
LONGEST = 1600
# Vocabularies from which on a row is an eighth of the window longer than that, and the logits that are compared then.
WIDE_VOCABULARY = 1 << 16
MOST_LOGITS = 1 << 26
ROWS = 3
# Of the rows in each micro-batch of the accumulation case; their numbers of tokens differ.
MICRO_BATCHES = (1, 2)

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to feed a batch.

    Attributes:
        name: for the verdicts.
        inputs: of `forward`.
        ours: how our face runs it, where that is not the plain way: "checkpointing", "compile" or "accumulation".
        theirs: how Hugging Face runs it: "plain", or "apart" for one packed sequence after another. Some of its classes
            (GPT-OSS) let packed sequences see one another.
    """

    name: str
    inputs: Inputs
    ours: str = "plain"
    theirs: str = "plain"

    def compared(self, logits: Tensor) -> Tensor:
        """Return the rows [*, V] of logits [B, S, V] that are compared, fp32.

        They are those that stand for a token; of a wide vocabulary an even choice of them. The loss and the gradients
        are of all.
        """
        mask = self.inputs.get("attention_mask")
        rows = (torch.ones_like(self.inputs["input_ids"]) if mask is None else mask).flatten().nonzero()[:, 0]
        most = max(1, MOST_LOGITS // logits.shape[-1])
        if len(rows) > most:
            rows = rows[torch.linspace(0, len(rows) - 1, most, dtype=torch.float64).round().long()]
        return logits.flatten(0, 1)[rows].float()


@dataclass(kw_only=True)
class Step:
    """What one forward and backward gave, fp32.

    Attributes:
        logits: [rows, V] of the rows that are compared.
        loss: the loss.
        gradients: by parameter; None where it got none.
    """

    logits: Tensor
    loss: float
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


def length_of(spec: ArchSpec) -> int:
    """Return the tokens of a row, so that windows show where that is affordable."""
    window = spec.sliding_window if "sliding_attention" in spec.layer_types else None
    more = 8 if spec.vocab_size >= WIDE_VOCABULARY else 2
    return min(max(LENGTH, window + window // more if window else 0), LONGEST)


def cases(spec: ArchSpec, pad_id: int | None, *, compiled: bool = True) -> list[Case]:
    """Make every case for a model; the same ones each time."""
    length = length_of(spec)
    left, right = _padded(spec, pad_id, length, "left"), _padded(spec, pad_id, length, "right")
    found = [
        Case(name="padding on the left", inputs=left),
        Case(name="padding on the right", inputs=right),
        Case(name="packed sequences", inputs=_packed(spec, length), theirs="apart"),
        Case(name="gradient checkpointing", inputs=left, ours="checkpointing"),
        Case(name="accumulation over micro-batches", inputs=right, ours="accumulation"),
    ]
    return [*found, Case(name="torch.compile", inputs=left, ours="compile")] if compiled else found


def _ids(spec: ArchSpec, shape: tuple[int, int], seed: int) -> Tensor:
    return torch.randint(
        min(5, spec.vocab_size - 1), spec.vocab_size, shape, generator=torch.Generator().manual_seed(seed)
    )


def _padded(spec: ArchSpec, pad_id: int | None, length: int, side: str) -> Inputs:
    ids = _ids(spec, (ROWS, length), 1)
    mask = torch.ones_like(ids)
    for row, missing in enumerate((length // 5, 0, length // 2)):
        if missing:
            mask[row, slice(0, missing) if side == "left" else slice(length - missing, length)] = 0
    ids = ids.masked_fill(mask == 0, 0 if pad_id is None else pad_id)
    # Nothing predicts the first token after padding: a row of padding sees what its implementation likes.
    predicted = mask.bool() & torch.cat((torch.zeros(ROWS, 1), mask[:, :-1]), dim=1).bool()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~predicted, IGNORED)}


def _packed(spec: ArchSpec, length: int) -> Inputs:
    first, second = length // 2 - 2, length // 6
    lengths = (first, second, length - first - second)
    ids = _ids(spec, (1, length), 2)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    # Nothing predicts the first token of a sequence from the end of the one before it.
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, IGNORED)}


def run(model: Any, case: Case, how: str = "plain") -> Step:
    """Run forward and backward.

    Args:
        model: in training mode, dropout off.
        case: the batch.
        how: "plain", a `Case.ours` or a `Case.theirs`.
    """
    model.zero_grad(set_to_none=True)
    with _as(model, how) as call:
        batches: list[tuple[Inputs, Tensor | None]] = [(case.inputs, None)]
        if how in _PARTS:
            whole = (case.inputs["labels"][:, 1:] != IGNORED).sum()
            batches = [(part, whole) for part in _PARTS[how](case.inputs)]
        outputs = []
        total = 0.0
        for inputs, count in batches:
            options: dict[str, Any] = {} if count is None else {"num_items_in_batch": count}
            output = call(**inputs, use_cache=False, **options)
            output.loss.backward()
            total += float(output.loss.detach())
            outputs.append(output.logits.detach())
    gradients = {
        name: None if parameter.grad is None else parameter.grad.detach().float().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    model.zero_grad(set_to_none=True)
    logits = torch.cat(outputs, dim=1 if how == "apart" else 0)
    return Step(logits=case.compared(logits), loss=total, gradients=gradients)


def _micro_batches(inputs: Inputs) -> list[Inputs]:
    """Cut a batch by rows."""
    parts = {name: value.split(list(MICRO_BATCHES)) for name, value in inputs.items()}
    return [{name: part[i] for name, part in parts.items()} for i in range(len(MICRO_BATCHES))]


def _sequences(inputs: Inputs) -> list[Inputs]:
    """Cut a row where its positions start again."""
    starts = (inputs["position_ids"][0] == 0).nonzero()[:, 0].tolist()
    ends = [*starts[1:], inputs["position_ids"].shape[1]]
    return [
        {name: value[:, start:end] for name, value in inputs.items()} for start, end in zip(starts, ends, strict=True)
    ]


# Ways to cut a batch; each part is divided by the number of tokens of the whole, as one mean over all of them.
_PARTS = {"accumulation": _micro_batches, "apart": _sequences}


@contextlib.contextmanager
def _as(model: Any, how: str) -> Iterator[Callable[..., Any]]:
    if how == "checkpointing":
        model.gradient_checkpointing_enable()
        try:
            yield model
        finally:
            model.gradient_checkpointing_disable()
    elif how == "compile":
        torch._dynamo.reset()
        yield torch.compile(model)
    else:
        yield model


def hugging_face(path: Path, dtype: torch.dtype, attention: str) -> Any:
    """Load transformers' own class, ready to train with dropout off."""
    model = hf.load(path, dtype, attention=attention)
    model.config.attention_dropout = 0.0
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return model.requires_grad_(True).train()


def ours(cls: Any, path: Path, dtype: torch.dtype, attention: str | None = None) -> Any:
    """Load our training class, ready to train with dropout off."""
    with hf.quiet():
        options = {} if attention is None else {"attn_implementation": attention}
        model = cls.from_pretrained(path, dtype=dtype, **options)
    model.config.attention_dropout = 0.0
    return model.train()
