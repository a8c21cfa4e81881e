"""Bucket sizes: which graphs exist, and which of them a batch runs in.

Every graph has a fixed shape, so a batch is padded up to the smallest bucket that holds it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal, NamedTuple

from pilotage.core.config import TargetConfig
from pilotage.core.errors import ConfigError

Kind = Literal["prefill", "decode"]

SMALLEST_TOKEN_BUCKET = 16  # on the CPU short prompts are worth graphs below the accelerator's 128


class Key(NamedTuple):
    """What a graph is chosen by.

    Attributes:
        kind: of the forwards that run in it.
        size: tokens of a prefill graph, requests of a decode graph.
        context: most tokens that a request of it may have cached after the step; 0 for as many as the model takes.
        segment: cached keys that a prefill graph reads at a time, 0 for all at once.
        fresh: no request of it has anything cached, and it reads no cache.
    """

    kind: Kind
    size: int
    context: int = 0
    segment: int = 0
    fresh: bool = False

    @property
    def name(self) -> str:
        """A name for files and tables, e.g. "decode-8-context256"."""
        parts = [self.kind, str(self.size)]
        parts += [f"context{self.context}"] if self.context else []
        parts += [f"segment{self.segment}"] if self.segment else []
        return "-".join([*parts, "fresh"] if self.fresh else parts)


class Reach(NamedTuple):
    """How far graphs look back: the lengths of `decode_context_length_buckets` and `kv_segment_size_buckets`."""

    contexts: tuple[int, ...] = ()
    segments: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: TargetConfig, max_model_len: int, block_size: int) -> Reach:
        """Read them from the target's configuration.

        Raises:
            ConfigError: a length that reaches `max_model_len`, or a segment that is no whole number of pages.
        """
        for key in ("decode_context_length_buckets", "kv_segment_size_buckets"):
            longest = (getattr(config, key) or (0,))[-1]
            if longest >= max_model_len:
                raise ConfigError(
                    f"{longest} is not below max_model_len, {max_model_len}, for which there is a graph anyway",
                    where=key,
                    do="remove it",
                )
        segments = config.kv_segment_size_buckets or ()
        if segments and segments[0] % block_size:
            raise ConfigError(
                f"a segment of {segments[0]} is no whole number of pages of {block_size}",
                where="kv_segment_size_buckets",
                do=f"use a block_size that divides {segments[0]}",
            )
        return cls(config.decode_context_length_buckets or (), segments)

    def keys(self, kind: Kind, size: int) -> tuple[Key, ...]:
        """Return the keys of all graphs of a kind and size, the least reading first."""
        if kind == "decode":
            return tuple(Key(kind, size, context) for context in (*self.contexts, 0))
        if not self.segments:
            return (Key(kind, size),)
        within = (Key(kind, size, segment, segment) for segment in self.segments[:-1])
        return (Key(kind, size, fresh=True), *within, Key(kind, size, segment=self.segments[-1]))

    def pick(self, kind: Kind, size: int, *, cached: int, longest: int) -> Key:
        """Return the key of the graph that reads least and holds a forward.

        Args:
            kind, size: of the graph.
            cached: most tokens that a request of the forward has cached before it. longest: after it.
        """
        return next(
            key
            for key in self.keys(kind, size)
            if (cached == 0 if key.fresh else key.context == 0 or longest <= key.context)
        )


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
