"""Drafts from the request's own text: what followed the last time that it said the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import InputBatch


def continuation(tokens: npt.NDArray[np.int32], *, count: int, shortest: int, longest: int) -> list[int]:
    """Return what followed the latest earlier occurrence of the longest repeated end of `tokens`.

    Args:
        tokens: [L] the request so far.
        count: most tokens to return.
        shortest, longest: lengths of the end that is looked for.

    Returns:
        Up to `count` tokens; none where not even the shortest end occurs before.
    """
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], length)
        found = np.flatnonzero((windows == tokens[-length:]).all(axis=1))
        if len(found):
            after = int(found[-1]) + length
            return [int(token) for token in tokens[after : after + count]]
    return []


class Ngram:
    """Proposes by `continuation`; needs no model."""

    choice = None

    def __init__(self, *, count: int, shortest: int, longest: int, max_model_len: int) -> None:
        self.count, self.shortest, self.longest, self.max_model_len = count, shortest, longest, max_model_len

    def observe(self, *states: object) -> None:
        """Do nothing: it reads tokens only."""

    def warm_up(self) -> float:
        """Do nothing: there is nothing to compile."""
        return 0.0

    def propose(self, batch: InputBatch, rows: Sequence[int]) -> list[list[int]]:
        """Propose for every row of the batch; only `rows` get drafts."""
        drafts: list[list[int]] = [[] for _ in range(batch.num_reqs)]
        for row in rows:
            length = int(batch.num_tokens_no_spec[row])
            count = min(self.count, self.max_model_len - length)
            if count > 0:
                drafts[row] = continuation(
                    batch.token_ids_cpu[row, :length], count=count, shortest=self.shortest, longest=self.longest
                )
        return drafts
