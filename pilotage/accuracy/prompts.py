"""The token streams that arms are compared on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pilotage.accuracy.arms.base import Stream

TEXT = """\
The harbour lies at the mouth of a slow river, and every spring the floods move its sandbanks. A captain who entered it
last autumn cannot trust his memory in May: where six metres of water stood, the lead now finds two. So the ships wait
outside the bar until the pilot comes out to them in a small boat, climbs the ladder, and takes his place beside the
helmsman. He says little. He looks at the colour of the water, at the two towers on the hill that must stand in line,
and at the smoke from the brickworks, because a wind that is fair in the channel may be foul behind the island.

def tide(hours, mean=2.4, swing=1.7):
    # The moon is late by fifty minutes a day.
    return mean + swing * math.cos(2 * math.pi * hours / 12.42)

High water on 14 March was at 03:52 and 16:17, with 4.1 m and 3.9 m; low water at 10:05 with 0.7 m. Three vessels went
in: the Aurora (112 m, draught 5.2 m), the Halcyon (87 m, 4.4 m) and a barge without a name. "You have half an hour,"
said the pilot, "and you will not need more than twenty minutes of it, unless you stop to thank me."

Question: if the tide rises 3.4 metres in 6 hours and 12 minutes, when has it risen by half? Answer: not after half of
the time exactly, but near it, since the curve is steepest in the middle. | 04:00 | 4.1 | | 07:00 | 2.4 |

La nuit, les feux du port se reflètent dans l'eau noire; on entend les drisses battre contre les mâts. Am Morgen liegt
Nebel über dem Fluss, und erst gegen neun Uhr sieht man das andere Ufer. There are eleven rules on the wall of the pilot
house. The first is to know where the bottom is. The second is that no chart is the bottom. The others were added later,
by people who had forgotten one of these two, and who wrote down what it had cost them.
"""

# Rows of logits that may be kept for one arm; beyond this, only some rows of each prompt are compared.
MAX_LOGITS = 48 * 1024 * 1024
LAST_ROWS = 6
SPREAD_ROWS = 10
WINDOWS = 3


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """How long the prompts are and how many tokens are forced after each."""

    prompts: tuple[int, ...]
    new_tokens: int


def lengths(*, sliding_window: int | None, max_position: int) -> Lengths:
    """Choose mixed prompt lengths that reach past the sliding window, and stay inside the model's context.

    A short window is passed three times over. A long one is passed by enough tokens that several decode steps and
    prompt rows look back past it.
    """
    new_tokens = 18
    longest = 150
    if sliding_window is not None:
        past = WINDOWS * sliding_window + sliding_window // 2
        longest = max(longest, past if past <= 300 else sliding_window + 88)
    limit = max(2, max_position - new_tokens)
    return Lengths(prompts=tuple(min(limit, n) for n in (9, 34, 75, longest)), new_tokens=new_tokens)


def token_ids(
    encode: Callable[[str], Sequence[int]] | None, sizes: Sequence[int], *, vocab_size: int, bos: int | None
) -> list[list[int]]:
    """Cut prompts of the given sizes from `TEXT`, each from another place, with BOS first where there is one.

    Args:
        encode: text to ids without special tokens; None draws seeded random ids instead.
        sizes: tokens of each prompt, BOS included.
        vocab_size: ids are below it.
        bos: id that starts every prompt, or None.
    """
    if encode is None:
        generator = torch.Generator().manual_seed(0)
        corpus = torch.randint(0, vocab_size, (sum(sizes),), generator=generator).tolist()
    else:
        corpus = [token for token in encode(TEXT) if token < vocab_size]
    prompts, start = [], 0
    for size in sizes:
        body = size - (bos is not None)
        ids = [corpus[(start + offset) % len(corpus)] for offset in range(body)]
        prompts.append([bos, *ids] if bos is not None else ids)
        start += body
    return prompts


def compared(length: int, prompt: int, *, everything: bool) -> tuple[int, ...]:
    """Choose the positions of a stream whose logits are compared: all decode rows, and all or some of the prompt's.

    Of a sampled prompt the last rows are taken, because they are where a window has moved furthest, and others spread
    over the rest.
    """
    if everything:
        return tuple(range(length - 1))
    last = range(max(0, prompt - LAST_ROWS), prompt)
    spread = [round(i * (prompt - 1) / SPREAD_ROWS) for i in range(SPREAD_ROWS)]
    return tuple(sorted({*spread, *last, *range(prompt, length - 1)}))


def streams(tokens: Sequence[Sequence[int]], prompts: Sequence[int], *, vocab_size: int) -> list[Stream]:
    """Make streams of prompts with continuations, comparing as many rows as `MAX_LOGITS` allows."""
    rows = sum(len(ids) - 1 for ids in tokens)
    everything = rows * vocab_size <= MAX_LOGITS
    return [
        Stream(tokens=tuple(ids), prompt=prompt, positions=compared(len(ids), prompt, everything=everything))
        for ids, prompt in zip(tokens, prompts, strict=True)
    ]
