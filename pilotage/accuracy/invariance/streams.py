"""The token streams of a run, and the sizes at whose edges things go wrong: pure.

Every request follows a prefix of one of a few fixed token streams, so a row (stream, position) means the same in all
conditions, however the tokens before it were cut into prompts, chunks and decode steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pilotage.serving.drive import Request

NEW_TOKENS = 6
DRAFTS = 3  # tokens that are drafted at a time


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The numbers at whose edges things go wrong.

    Attributes:
        block: slots in a page.
        windows: sliding windows of the layers, without None.
        token_buckets: prefill graphs; the last one is the most tokens in a step.
        seq_buckets: decode graphs; the last one is the most requests at once.
        max_len: longest request.
    """

    block: int
    windows: tuple[int, ...]
    token_buckets: tuple[int, ...]
    seq_buckets: tuple[int, ...]
    max_len: int

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt: past every window that fits, and not a multiple of anything."""
        limit = min(self.max_len - NEW_TOKENS - 1, self.token_buckets[-1] - NEW_TOKENS)
        wanted = 4 * self.block + 3
        for window in self.windows:
            wanted = max(wanted, 3 * window + window // 2 if window <= 96 else window + self.block + self.block // 2)
        wanted = max([wanted, *(bucket + 2 for bucket in self.token_buckets[:-1] if bucket <= 2 * wanted)])
        return max(2, min(wanted, limit))

    def edges(self) -> list[int]:
        """Prompt lengths one below, at and one above everything that has an edge, ascending, at most `longest`."""
        marks = {self.block, 2 * self.block, *self.windows, *self.token_buckets}
        marks |= {window + self.block for window in self.windows}
        found = {1, 2} | {mark + step for mark in marks for step in (-1, 0, 1)}
        return sorted(length for length in found if 1 <= length <= self.longest)


# Whether a draft is wrong, by the number of output tokens before it was drafted and its number among the drafts.
Falls = Callable[[int, int], bool]


@dataclass(frozen=True, kw_only=True)
class Streams:
    """The token streams of a run; `names` says what each is for.

    Attributes:
        tokens: by stream.
        prompts: tokens of each stream's prompt in the reference condition.
        names: for people.

    The last stream shares its first pages with the first one and appears in prefix hits only: in any other condition a
    hit would hide which of the two broke it.
    """

    tokens: tuple[tuple[int, ...], ...]
    prompts: tuple[int, ...]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def company(self) -> range:
        """The streams that are run together."""
        return range(len(self.tokens) - 1)

    @property
    def sibling(self) -> int:
        """The stream that shares its beginning with the first one."""
        return len(self.tokens) - 1

    def request(
        self,
        stream: int,
        *,
        prompt: int | None = None,
        new: int | None = None,
        arrives: int = 0,
        drafts: Falls | None = None,
    ) -> Request:
        """Return a request for a stream; by default with the reference's prompt and the whole continuation."""
        start = self.prompts[stream] if prompt is None else prompt
        tokens = self.tokens[stream]
        end = len(tokens) if new is None else min(len(tokens), start + new)
        drafted: tuple[tuple[int, ...], ...] = ()
        if drafts is not None:
            # A wrong draft is a token of another stream: a real one, only not the right one here.
            other = self.tokens[(stream + 1) % len(self.tokens)]
            drafted = tuple(
                tuple(
                    next(id for id in other if id != token) if drafts(after, n) else token
                    for n, token in enumerate(tokens[start + after : min(start + after + DRAFTS, end)])
                )
                for after in range(end - start)
            )
        return Request(tokens=tokens[:end], prompt=start, arrives=arrives, drafts=drafted)


def stream_lengths(sizes: Sizes) -> dict[str, int]:
    """Choose the streams: name -> prompt tokens."""
    longest = sizes.longest
    middle = min(longest, 2 * sizes.block + sizes.block // 2 + 3)
    wanted = {
        "longest": longest,
        "middle": middle,
        "past a bucket": min(longest, sizes.token_buckets[0] + 1),
        "one page": min(longest, sizes.block),
        "short": min(longest, 7),
        "one token": 1,
    }
    return dict(list(wanted.items())[: max(2, sizes.seq_buckets[-1])]) | {"sibling of the longest": middle}


def make(sizes: Sizes, draw: Callable[[Sequence[int]], Sequence[Sequence[int]]]) -> Streams:
    """Make the streams.

    Args:
        sizes: of the engine.
        draw: lengths -> that many token sequences, all different.
    """
    lengths = stream_lengths(sizes)
    tokens = [tuple(ids) for ids in draw([length + NEW_TOKENS for length in lengths.values()])]
    shared = min(2 * sizes.block + 1, list(lengths.values())[-1] - 1)
    tokens[-1] = (*tokens[0][:shared], *tokens[-1][shared:])
    return Streams(tokens=tuple(tokens), prompts=tuple(lengths.values()), names=tuple(lengths))
