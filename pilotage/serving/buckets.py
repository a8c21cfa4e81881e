"""Bucket sizes: which graphs exist, and which of them a batch runs in.

Every graph has a fixed shape, so a batch is padded up to the smallest bucket that holds it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from pilotage.core.errors import ConfigError

SMALLEST_TOKEN_BUCKET = 16  # on the CPU short prompts are worth graphs below the accelerator's 128


def powers_of_two(first: int, last: int) -> tuple[int, ...]:
    """Return the powers of two from `first` that are below `last`, and `last` itself."""
    sizes = []
    size = first
    while size < last:
        sizes.append(size)
        size *= 2
    return (*sizes, last)


def token_buckets(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Return the default prefill buckets in packed tokens."""
    return powers_of_two(SMALLEST_TOKEN_BUCKET, max_num_batched_tokens)


def seq_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Return the default decode buckets in requests."""
    return powers_of_two(1, max_num_seqs)


def fit(key: str, given: Sequence[int] | None, defaults: Sequence[int], limit_name: str) -> tuple[int, ...]:
    """Return the buckets to build: those given, or the defaults.

    Args:
        key: name of the setting.
        given: the user's sizes, ascending, or None.
        defaults: default sizes, ascending; the last one is vLLM's own limit.
        limit_name: name of vLLM's limit.

    Raises:
        ConfigError: a given size is above vLLM's limit and could never be used.
    """
    if given is None:
        return tuple(defaults)
    limit = defaults[-1]
    if given[-1] > limit:
        raise ConfigError(
            f"bucket {given[-1]} can never be used: {limit_name} is {limit}",
            where=key,
            do=f"remove it or raise {limit_name}",
        )
    return tuple(given)


def pick(sizes: Sequence[int], count: int, key: str) -> int:
    """Return the smallest of `sizes` (ascending) that is at least `count`.

    Raises:
        ConfigError: `count` is over the largest bucket.
    """
    index = bisect_left(sizes, count)
    if index == len(sizes):
        raise ConfigError(
            f"{count} is over the largest bucket, {sizes[-1]}", where=key, do=f"add a bucket of at least {count}"
        )
    return sizes[index]
