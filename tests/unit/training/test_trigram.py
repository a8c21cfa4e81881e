"""The yardstick is what counting by hand gives."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from pilotage.training.packing import Tokens
from pilotage.training.trigram import add_k_loss, trigrams


def documents(*texts: str) -> Tokens:
    ids = np.array([ord(letter) - ord("a") for text in texts for letter in text], dtype=np.int32)
    starts = np.cumsum([0, *[len(text) for text in texts[:-1]]])
    return Tokens(ids, np.ones(len(ids), bool), starts.astype(np.int64))


def by_hand(texts: list[str]) -> list[str]:
    return [(text[0] + text)[at : at + 3] for text in texts for at in range(len(text) - 1)]


def test_contexts_stay_inside_their_document() -> None:
    found = ["".join(chr(ord("a") + token) for token in row) for row in trigrams(documents("abc", "b", "cab"))]
    assert found == by_hand(["abc", "b", "cab"]) == ["aab", "abc", "cca", "cab"]


def test_the_loss_is_the_one_counted_by_hand() -> None:
    train, held = ["abcabd", "abca", "bbbbab"], ["abcab", "dab", "bb"]
    threes, pairs = Counter(by_hand(train)), Counter(part[:2] for part in by_hand(train))
    k, vocabulary = 0.3, 4
    expected = [-math.log((threes[t] + k) / (pairs[t[:2]] + k * vocabulary)) for t in by_hand(held)]
    loss, best = add_k_loss(documents(*train), documents(*held), vocabulary, [k])
    assert best == k
    assert loss == pytest.approx(sum(expected) / len(expected), rel=1e-12)


def test_k_is_chosen_in_the_yardsticks_favour() -> None:
    train, held = documents("abcabcabc"), documents("abcabc")
    losses = {k: add_k_loss(train, held, 4, [k])[0] for k in (1.0, 0.01)}
    assert add_k_loss(train, held, 4, [1.0, 0.01]) == (min(losses.values()), 0.01)
