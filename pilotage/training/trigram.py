"""A yardstick for a language model: a trigram with add-k smoothing over the same tokens. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pilotage.training.packing import Tokens

K = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003)


def trigrams(tokens: Tokens) -> np.ndarray:
    """Return [n, 3] tokens: each one of a document but its first, behind the two before it.

    Behind the first token stands that token twice, so that no context reaches into another document. These are the
    targets that a model has on the same documents.
    """
    ids = tokens.ids.astype(np.int64)
    before = np.concatenate(([ids[0]], ids[:-1]))
    twice = np.concatenate(([ids[0]], before[:-1]))
    first = np.zeros(len(ids), dtype=bool)
    first[tokens.starts] = True
    second = np.concatenate(([False], first[:-1])) & ~first
    twice[second] = before[second]
    return np.stack((twice, before, ids), axis=1)[~first]


def add_k_loss(train: Tokens, held_out: Tokens, vocabulary: int, ks: Sequence[float] = K) -> tuple[float, float]:
    """Return the mean negative log-likelihood of `held_out` in nats, and the k of `ks` that makes it smallest.

    k is chosen on the held-out tokens themselves, in the yardstick's favour.
    """
    counted, asked = trigrams(train), trigrams(held_out)
    whole = np.array([vocabulary**2, vocabulary, 1])
    pair = np.array([vocabulary, 1])
    seen, of_pair = _counts(counted @ whole, asked @ whole), _counts(counted[:, :2] @ pair, asked[:, :2] @ pair)
    losses = {k: float(-np.log((seen + k) / (of_pair + k * vocabulary)).mean()) for k in ks}
    best = min(losses, key=losses.__getitem__)
    return losses[best], best


def _counts(keys: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Count how often each of `asked` is among `keys`."""
    known, counts = np.unique(keys, return_counts=True)
    at = np.searchsorted(known, asked).clip(max=len(known) - 1)
    return np.where(known[at] == asked, counts[at], 0)
