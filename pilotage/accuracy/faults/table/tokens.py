"""Tokenizer faults: found by comparing ids, since forced tokens hide them from every other check."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pilotage.accuracy.faults.fault import Fault, Plant, method

_tokens = partial(Fault, heading="Tokenizer / BOS", where=("tokenizer",), subject="tokenizer")


def _encoder() -> Any:
    from pilotage.accuracy.faults.target import ServedEncoder

    return ServedEncoder


def _text(wrong: Callable[..., list[int]]) -> Plant:
    return method(_encoder, "text", wrong)


def _twice(real: Any, self: Any, messages: Any) -> list[int]:
    """The template writes BOS and the tokenizer adds another."""
    return [self.tokenizer.bos_token_id, *real(self, messages)]


def _digits(real: Any, self: Any, text: str) -> list[int]:
    """Each digit and apostrophe by itself, as another model's pre-tokenizer splits."""
    pieces: list[str] = []
    for character in text:
        if character.isdigit() or character == "'" or not pieces or pieces[-1][-1:].isdigit() or pieces[-1] == "'":
            pieces.append(character)
        else:
            pieces[-1] += character
    ids = [self.tokenizer.bos_token_id]
    for piece in pieces:
        ids += self.tokenizer.encode(piece.replace("'", "'\u200b"), add_special_tokens=False)
    return ids


def _no_bos(real: Any, self: Any, text: str) -> list[int]:
    return real(self, text)[1:]


def _eos_behind(real: Any, self: Any, text: str) -> list[int]:
    """The end of a sequence written behind every prompt."""
    return [*real(self, text), self.tokenizer.eos_token_id]


def _no_answer_begun(real: Any, self: Any, messages: Any) -> list[int]:
    """The template without the words that begin the answer."""
    return real(self, messages)[:-1]


def _stripped(real: Any, self: Any, text: str) -> list[int]:
    return real(self, text.strip().lower())


FAULTS = (
    _tokens(name="BOS twice in conversations", model="gemma3", plant=method(_encoder, "chat", _twice)),
    _tokens(name="another pre-tokenizer", model="llama3", plant=_text(_digits)),
    _tokens(name="end of sequence behind prompts", model="qwen3", plant=_text(_eos_behind)),
    _tokens(name="answer not begun in conversations", model="llama3", plant=method(_encoder, "chat", _no_answer_begun)),
    _tokens(name="text normalised another way", model="mistral", plant=_text(_stripped)),
    _tokens(name="no BOS before prompts", model="gpt_oss", plant=_text(_no_bos)),
)
