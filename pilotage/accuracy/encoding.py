"""Does the served model get the tokens that Hugging Face would give it?

Token ids are forced everywhere else in the comparison, so a tokenizer that differs shows nowhere but here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from pilotage.core.nouns import Status, Verdict

# Numbers, contractions, white space, scripts, emoji, code: where one pre-tokenizer's rules are not another's.
TEXTS = (
    "3333+777 = 4110, not 1,234.5e-6",
    "It's the pilot's; they'll say we've DON'T",
    "a  b\t\tc\n\n  d   ",
    "La nuit, les feux du port; Am Morgen Nebel über dem Fluß",
    "日本語 и русский ☃ 🚢",
    "def tide(h):\n    return {'mean': 2.4}[h]",
    "",
)
CHATS = (
    [{"role": "user", "content": "When is high water?"}],
    [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Good morning."},
        {"role": "user", "content": "It's 03:52?"},
    ],
)


class Encodes(Protocol):
    """A tokenizer as a serving stack uses it."""

    def text(self, text: str) -> list[int]: ...

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None: ...


class Encoder:
    """The tokenizer of a checkpoint directory, as Hugging Face applies it.

    Args:
        path: the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        from transformers import AutoTokenizer

        from pilotage.accuracy.arms import hf

        loader: Any = AutoTokenizer
        with hf.quiet():
            self.tokenizer = loader.from_pretrained(path)

    def text(self, text: str) -> list[int]:
        """Encode a prompt, special tokens included."""
        return list(self.tokenizer.encode(text))

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        """Encode a conversation by the chat template; None where there is none."""
        if not getattr(self.tokenizer, "chat_template", None):
            return None
        found = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        return [int(token) for token in found]


def encoding_verdict(target: Encodes, reference: Encodes) -> Verdict:
    """Compare the ids of texts and conversations.

    Args:
        target: what the served model is fed by.
        reference: Hugging Face's.

    Returns:
        A verdict whose evidence lists the first texts that differ.
    """
    differing = []
    compared = 0
    pairs = [(text, target.text(text), reference.text(text)) for text in TEXTS]
    pairs += [(str(chat), target.chat(chat) or [], reference.chat(chat) or []) for chat in CHATS]
    for text, ours, theirs in pairs:
        compared += 1
        if list(ours) != list(theirs):
            differing.append({"text": text, "target": list(ours)[:12], "reference": list(theirs)[:12]})
    return Verdict(
        claim="texts and conversations are encoded as Hugging Face encodes them",
        metric="texts_differing",
        estimate=float(len(differing)),
        bound=0.0,
        bound_source="the same tokenizer gives the same ids",
        n=compared,
        status=Status.FAIL if differing else Status.PASS,
        evidence={"texts": differing[:3]},
    )
