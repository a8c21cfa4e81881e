"""Whether the tokens of a condition are those that they should be: pure.

A row of logits may be right and the token all the same another one: sampled from another row, a draft taken that fell,
or one dropped that stands. A forced request must answer its tokens. One that chooses must answer, at every position,
what the logits recorded there like best; no noise comes between the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pilotage.core.nouns import Status, Verdict
from pilotage.serving.drive import Request


def odd(request: Request, said: Sequence[int], logits: Mapping[int, Tensor]) -> tuple[int, int, int] | None:
    """Find the first token of a request that should have been another one.

    Args:
        request: what was asked.
        said: what was answered.
        logits: position -> [V] as they were recorded.

    Returns:
        Position of the token in the request, the token, and the one that was due; -1 stands for no token. None where
        all are right.
    """
    if request.forced:
        pairs = zip(said, request.continuation, strict=False)
        wrong = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        if wrong is None and len(said) == len(request.continuation):
            return None
        wrong = min(len(said), len(request.continuation)) if wrong is None else wrong
        given, due = ([*tokens, -1][wrong] for tokens in (said[: wrong + 1], request.continuation[: wrong + 1]))
        return request.prompt + wrong, int(given), int(due)
    for number, token in enumerate(said):
        row = logits.get(request.prompt + number - 1)
        if row is not None and float(row[token]) < float(row.max()):
            return request.prompt + number, int(token), int(torch.argmax(row))
    return None if len(said) == len(request.continuation) else (request.prompt + len(said), -1, -1)


def judge(
    requests: Sequence[Request], said: Sequence[Sequence[int]], logits: Mapping[tuple[int, int], Tensor], claim: str
) -> tuple[Verdict, list[dict[str, Any]]]:
    """Judge the tokens of all requests.

    Returns:
        The verdict, and for each request with a wrong token where that is: JSON values.
    """
    broke = []
    for number, (request, answer) in enumerate(zip(requests, said, strict=True)):
        found = odd(request, answer, {p: row for (r, p), row in logits.items() if r == number})
        if found is not None:
            position, token, due = found
            broke.append(
                {
                    "request": number,
                    "position": position,
                    "phase": "decode",
                    "expected": "tokens",
                    "token": token,
                    "due": due,
                    "computed": f"answered {token}, not {due}",
                }
            )
    free = any(not request.forced for request in requests)
    rule = "the best of its logits" if free else "the one that was forced"
    verdict = Verdict(
        claim=f"{claim}: every token is {rule}",
        metric="tokens",
        estimate=float(len(broke)),
        bound=0.0,
        bound_source="a choice has no noise",
        n=sum(len(answer) for answer in said),
        status=Status.FAIL if broke else Status.PASS,
    )
    return verdict, broke
