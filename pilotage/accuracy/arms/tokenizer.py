"""A checkpoint's own tokenizer, as Hugging Face loads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pilotage.accuracy.arms.hf import quiet

FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def has_tokenizer(path: Path) -> bool:
    """Whether a checkpoint directory holds a tokenizer."""
    return any((path / name).is_file() for name in FILES)


def encoder(path: Path) -> Callable[[str], list[int]] | None:
    """Return text -> ids without special tokens, or None for a checkpoint without a tokenizer."""
    from transformers import AutoTokenizer

    if not has_tokenizer(path):
        return None
    loader: Any = AutoTokenizer
    with quiet():
        tokenizer = loader.from_pretrained(path)

    def encode(text: str) -> list[int]:
        with quiet():  # the text is longer than some models' context, and is cut before it is used
            return list(tokenizer.encode(text, add_special_tokens=False))

    return encode
