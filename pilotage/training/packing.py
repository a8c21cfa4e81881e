"""Rows of tokens: documents packed one after another, none of which sees another. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pilotage.training.engine import IGNORED, Batch


@dataclass(frozen=True)
class Tokens:
    """Documents, one after another.

    Attributes:
        ids: [T] int32.
        learned: [T] bool; False for tokens that are given and not to be predicted, such as a prompt's.
        starts: [documents] int64, where each begins.
    """

    ids: np.ndarray
    learned: np.ndarray
    starts: np.ndarray


class Rows:
    """Documents cut into rows of equal length; every token is in one of them.

    A row may begin inside a document and end inside another. Positions start again with each document and each row.
    What follows the last document in the last row is padding without targets.

    Args:
        tokens: the documents.
        length: S.
        padding: token id of the padding.
    """

    def __init__(self, tokens: Tokens, length: int, padding: int) -> None:
        self.tokens, self.length, self.padding = tokens, length, padding

    def __len__(self) -> int:
        return (len(self.tokens.ids) + self.length - 1) // self.length

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return input ids, labels and positions [S] of a row, int64."""
        tokens, start = self.tokens, index * self.length
        end = min(start + self.length, len(tokens.ids))
        count = end - start
        ids = np.full(self.length, self.padding, dtype=np.int64)
        labels = np.full(self.length, IGNORED, dtype=np.int64)
        positions = np.arange(self.length, dtype=np.int64)
        ids[:count] = tokens.ids[start:end]
        following = min(end + 1, len(tokens.ids))
        labels[: following - start - 1] = np.where(
            tokens.learned[start + 1 : following], tokens.ids[start + 1 : following], IGNORED
        )
        first, last = np.searchsorted(tokens.starts, [start + 1, following])
        for begin in [*(int(begin) - start for begin in tokens.starts[first:last]), count]:
            if begin < self.length:
                positions[begin:] = np.arange(self.length - begin)
            if begin <= count and begin > 0 and start + begin < len(tokens.ids) and start + begin in tokens.starts:
                labels[begin - 1] = IGNORED  # the next document is no continuation of this one
        return ids, labels, positions

    def batch(self, indices: list[int]) -> Batch:
        """Stack rows; an index past the end is a row without targets."""
        blank = (np.full(self.length, self.padding), np.full(self.length, IGNORED), np.arange(self.length))
        rows = [self.row(index) if index < len(self) else blank for index in indices]
        return Batch(*(torch.from_numpy(np.stack(column).astype(np.int64)) for column in zip(*rows, strict=True)))


def order(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return a permutation of `count` rows, another one in each epoch."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def rows_of_step(step: int, *, rows: int, count: int, seed: int) -> list[int]:
    """Return which rows a step learns from: all rows in a random order, then again in another.

    Args:
        step: from 0.
        rows: of a step, over all processes.
        count: rows there are.
        seed: of the order.
    """
    found: list[int] = []
    epoch, at = divmod(step * rows, count)
    while len(found) < rows:
        found += order(count, seed, epoch)[at : at + rows - len(found)].tolist()
        epoch, at = epoch + 1, 0
    return found
