"""Token ids of the served side against Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pilotage.accuracy.encoding import CHATS, TEXTS, Encoder, encoding_verdict
from pilotage.core.nouns import Status


class Doubled(Encoder):
    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        return [2, *(super().chat(messages) or [])]


def test_the_same_tokenizer_agrees_and_a_second_bos_does_not(tiny: Callable[..., Path]) -> None:
    path = tiny("gemma3")
    same = encoding_verdict(Encoder(path), Encoder(path))
    assert same.status is Status.PASS and same.n == len(TEXTS) + len(CHATS)
    twice = encoding_verdict(Doubled(path), Encoder(path))
    assert twice.status is Status.FAIL and twice.estimate == len(CHATS)
    assert twice.evidence["texts"][0]["target"][:2] == [2, 2]
