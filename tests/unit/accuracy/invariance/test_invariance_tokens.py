"""Which token is wrong: of requests that are forced, and of those that choose."""

from __future__ import annotations

import torch

from pilotage.accuracy.invariance import tokens
from pilotage.core.nouns import Status
from pilotage.serving.drive import Drove, NotFollowed, Request

FORCED = Request(tokens=(5, 6, 7, 8, 9), prompt=2, drafts=((7, 8), (8, 5), (5,)))
ROWS = {(0, position): torch.eye(12)[token] for position, token in ((1, 7), (2, 8), (3, 9))}


def test_a_forced_request_answers_its_tokens() -> None:
    assert tokens.odd(FORCED, (7, 8, 9), {}) is None
    assert tokens.odd(FORCED, (7, 3, 9), {}) == (3, 3, 8)
    assert tokens.odd(FORCED, (7, 8), {}) == (4, -1, 9)
    assert tokens.odd(FORCED, (7, 8, 9, 4), {}) == (5, 4, -1)


def test_a_request_that_chooses_answers_what_its_logits_like_best() -> None:
    free = Request(tokens=FORCED.tokens, prompt=2, forced=False)
    clean, none = tokens.judge([free], [(7, 8, 9)], ROWS, "c")
    assert clean.status is Status.PASS and clean.n == 3 and not none
    verdict, broke = tokens.judge([free], [(7, 9, 8)], ROWS, "c")
    assert verdict.status is Status.FAIL and verdict.estimate == 1
    assert (broke[0]["position"], broke[0]["token"], broke[0]["due"]) == (3, 9, 8)
    # What was not recorded is not judged, and of two that are equal either is right.
    assert tokens.odd(free, (3, 8, 9), {2: ROWS[0, 2]}) is None
    assert tokens.odd(free, (4, 8, 9), {1: torch.zeros(12)}) is None
    assert tokens.odd(free, (), {}) == (2, -1, -1), "a request that is not answered"


def test_the_drafts_of_another_continuation_are_right_and_wrong_in_the_same_places() -> None:
    other = FORCED.says((1, 2, 3))
    assert other.tokens == (5, 6, 1, 2, 3)
    first, second, third = other.drafts
    assert first == (1, 2)
    assert second[0] == 2 and second[1] != 3
    assert third[0] != 3


def test_an_answer_that_was_not_forced_says_where_it_turned() -> None:
    drove = Drove(steps=3, preempted=0)
    assert NotFollowed(1, (7, 3, 9), (7, 8, 9), drove).position == 1
    assert NotFollowed(1, (7, 8), (7, 8, 9), drove).position == 2
