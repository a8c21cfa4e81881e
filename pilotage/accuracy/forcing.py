"""Make anything that generates follow the reference's tokens, and collect the logits that it computes on the way.

Two ways, which give the same numbers. The retry loop works with whatever continues a prompt: as long as it says what
the reference said its logits are comparable, and where it says something else the reference's tokens up to there are
appended to the prompt and it is asked again. One-pass forcing needs a source that takes the tokens to follow, and then
a divergence costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from pilotage.core.errors import BadInput, PilotageError

Ids = Tensor | Sequence[Sequence[int]]
How = Literal["auto", "retry", "one_pass"]


@dataclass(frozen=True, kw_only=True)
class TopLogprobs:
    """The most likely tokens of each step with their log-probabilities: all that an OpenAI-compatible server tells.

    Attributes:
        ids: [steps, batch, k] token ids, -1 where fewer were returned.
        values: [steps, batch, k] natural log-probabilities; ignored where the id is -1.
        least: [steps, batch] what no token that was not returned exceeds.
    """

    ids: Tensor
    values: Tensor
    least: Tensor

    @classmethod
    def of(cls, rows: Sequence[Sequence[tuple[Mapping[int, float], float]]], steps: int) -> TopLogprobs:
        """Lay out dictionaries.

        Args:
            rows: for each batch row and step the log-probabilities by token, and what no other token exceeds.
            steps: how many of each are taken.
        """
        width = max((len(found) for row in rows for found, _ in row[:steps]), default=1)
        ids = torch.full((steps, len(rows), width), -1, dtype=torch.int64)
        values = torch.zeros(steps, len(rows), width, dtype=torch.float64)
        least = torch.zeros(steps, len(rows), dtype=torch.float64)
        for batch_row, row in enumerate(rows):
            for step, (found, bound) in enumerate(row[:steps]):
                ids[step, batch_row, : len(found)] = torch.tensor(list(found), dtype=torch.int64)
                values[step, batch_row, : len(found)] = torch.tensor(list(found.values()), dtype=torch.float64)
                least[step, batch_row] = bound
        return cls(ids=ids, values=values, least=least)

    def __post_init__(self) -> None:
        if self.ids.shape != self.values.shape or self.ids.ndim != 3:
            raise BadInput(
                f"ids {tuple(self.ids.shape)} and values {tuple(self.values.shape)} are not both [steps, batch, k]",
                where="TopLogprobs",
            )

    @property
    def steps(self) -> int:
        return self.ids.shape[0]

    def head(self, steps: int) -> TopLogprobs:
        """Return the first steps."""
        return TopLogprobs(ids=self.ids[:steps], values=self.values[:steps], least=self.least[:steps])


Found = Tensor | TopLogprobs
Generate = Callable[[Any], Any]


@runtime_checkable
class Forcing(Protocol):
    """A generate function that can also be made to follow tokens in one pass."""

    def __call__(self, ids: Ids) -> Any: ...

    def forced(self, ids: Ids, tokens: Tensor) -> Found:
        """Return the logits [steps, batch, vocab] of the steps that say `tokens` [steps, batch]."""
        ...


@dataclass(frozen=True, kw_only=True)
class Followed:
    """What a source computed while it followed the reference.

    Attributes:
        found: [steps, batch, vocab] logits, or the top of them; fewer steps than asked for if the source gave up.
        calls: how often the source was asked.
        divergences: steps at which it had to be led back.
    """

    found: Found
    calls: int
    divergences: list[int]


def follow(ids: Ids, generate: Generate, tokens: Tensor, *, how: How = "auto") -> Followed:
    """Let a source follow the reference's tokens.

    Args:
        ids: [batch, prompt] prompt tokens, or a list of lists where their lengths differ.
        generate: ids -> logits [steps, batch, vocab], or (logits, sequences) with sequences [batch, steps] or
            [batch, prompt + steps]; without sequences it is taken to have said its argmax.
        tokens: [steps, batch] the reference's tokens.
        how: "retry", "one_pass" (needs `generate.forced`), or "auto": one pass where it can be had.

    Raises:
        BadInput: shapes that do not fit, or one pass asked of a source that cannot.
    """
    if how == "one_pass" and not isinstance(generate, Forcing):
        raise BadInput("this source cannot be forced in one pass", where="generate_fn", do="use how='retry'")
    if how != "retry" and isinstance(generate, Forcing):
        found = _checked(generate.forced(ids, tokens), tokens)
        return Followed(found=found, calls=1, divergences=[])
    steps = tokens.shape[0]
    parts: list[Found] = []
    divergences: list[int] = []
    start = calls = 0
    while start < steps:
        found, said = _asked(generate, extended(ids, tokens[:start]), tokens[start:])
        calls += 1
        available = min(said.shape[0], steps - start)
        if not available:
            break  # it has ended; what is missing is not measured
        agree = (said[:available] == tokens[start : start + available]).all(1)
        same = int(agree.long().cumprod(0).sum())
        used = min(same + 1, available)
        if same < available:
            divergences.append(start + same)
        parts.append(found.head(used) if isinstance(found, TopLogprobs) else found[:used])
        start += used
    return Followed(found=_joined(parts, tokens), calls=calls, divergences=divergences)


def extended(ids: Ids, tokens: Tensor) -> Ids:
    """Append [steps, batch] tokens to the prompts."""
    if isinstance(ids, Tensor):
        return torch.cat([ids, tokens.T.to(ids.dtype)], dim=1)
    return [[*prompt, *tokens[:, row].tolist()] for row, prompt in enumerate(ids)]


def _asked(generate: Generate, ids: Ids, tokens: Tensor) -> tuple[Found, Tensor]:
    """Ask once; returns what was found and [steps, batch] the tokens it was said with."""
    answer = generate(ids)
    found, sequences = answer if isinstance(answer, tuple) else (answer, None)
    found = _checked(found, tokens, whole=False)
    if sequences is None:
        said = found.ids[..., 0] if isinstance(found, TopLogprobs) else found.argmax(-1)
        return found, said
    rows = [list(map(int, row)) for row in sequences]
    steps = found.steps if isinstance(found, TopLogprobs) else found.shape[0]
    prompts = [list(map(int, row)) for row in ids]
    said_rows = [row[len(prompt) :] if len(row) > steps else row for row, prompt in zip(rows, prompts, strict=True)]
    if any(len(row) != steps for row in said_rows):
        raise BadInput(
            f"{steps} steps of logits, but sequences of {[len(row) for row in rows]} tokens",
            where="generate_fn",
            do="return the generated tokens, or prompt and generated tokens",
        )
    return found, torch.tensor(said_rows).reshape(len(rows), steps).T


def _checked(found: Any, tokens: Tensor, *, whole: bool = True) -> Found:
    if isinstance(found, TopLogprobs):
        shape = tuple(found.ids.shape)
    elif isinstance(found, Tensor):
        shape = tuple(found.shape)
    else:
        raise BadInput(f"returned {type(found).__name__}, not logits", where="generate_fn")
    if len(shape) != 3 or shape[1] != tokens.shape[1]:
        raise BadInput(f"logits of shape {shape}; expected [steps, {tokens.shape[1]}, vocabulary]", where="generate_fn")
    if whole and shape[0] != tokens.shape[0]:
        raise BadInput(f"{shape[0]} steps of logits for {tokens.shape[0]} forced tokens", where="generate_fn")
    return found


def _joined(parts: Sequence[Found], tokens: Tensor) -> Found:
    if not parts:
        raise PilotageError("returned no step at all", where="generate_fn", do="let it generate at least one token")
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    tops = [part for part in parts if isinstance(part, TopLogprobs)]
    width = max(part.ids.shape[-1] for part in tops)

    def padded(value: Tensor, fill: float) -> Tensor:
        return torch.nn.functional.pad(value, (0, width - value.shape[-1]), value=fill)

    return TopLogprobs(
        ids=torch.cat([padded(part.ids, -1) for part in tops]),
        values=torch.cat([padded(part.values, 0.0) for part in tops]),
        least=torch.cat([part.least for part in tops]),
    )
