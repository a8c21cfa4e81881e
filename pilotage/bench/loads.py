"""What is asked of every arm: lengths, how many requests, how many at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pilotage.core.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests of one kind.

    Attributes:
        name: as on the command line and in the result.
        input_len: tokens of a prompt, on average.
        output_len: tokens of an answer, on average; with 1 only the time to the first token is measured.
        concurrency: requests that run at once.
        num_prompts: requests of one repeat.
        spread: prompt and answer lengths vary by this share of their averages.
        named_only: it takes long, so it runs where it is named and not by default.
        about: in words.
    """

    name: str
    input_len: int
    output_len: int
    concurrency: int
    num_prompts: int
    about: str
    spread: float = 0.0
    named_only: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the longest request that may come up."""
        return int((self.input_len + self.output_len) * (1 + self.spread)) + 1

    @property
    def decodes(self) -> bool:
        """Whether there is a decode phase to measure."""
        return self.output_len > 1


LOADS = {
    load.name: load
    for load in (
        Load(
            name="decode-x1",
            input_len=32,
            output_len=64,
            concurrency=1,
            num_prompts=1,
            about="one sequence, 32 tokens in, 64 out",
        ),
        Load(
            name="decode-x8",
            input_len=32,
            output_len=64,
            concurrency=8,
            num_prompts=8,
            about="eight sequences at once, 32 tokens in, 64 out each",
        ),
        Load(
            name="prefill-1024",
            input_len=1024,
            output_len=1,
            concurrency=1,
            num_prompts=1,
            about="one prompt of 1,024 tokens, one token out",
        ),
        Load(
            name="mixed",
            input_len=96,
            output_len=24,
            concurrency=4,
            num_prompts=8,
            spread=0.5,
            about="eight requests, four at once, 48 to 144 tokens in, 12 to 36 out",
        ),
        Load(
            name="decode-x32",
            input_len=512,
            output_len=80,
            concurrency=32,
            num_prompts=32,
            named_only=True,
            about="thirty-two sequences at once, 512 tokens in, 80 out each",
        ),
        Load(
            name="serve-64",
            input_len=128,
            output_len=64,
            concurrency=64,
            num_prompts=64,
            spread=0.5,
            named_only=True,
            about="sixty-four requests sent at once, 64 to 192 tokens in, 32 to 96 out",
        ),
    )
}


def choose(names: str | None, *, max_model_len: int) -> list[Load]:
    """Turn a comma-separated list of names into loads; None takes all that fit and do not take long.

    Args:
        names: e.g. "decode-x1,prefill-1024".
        max_model_len: longest request that the model serves.

    Raises:
        BadInput: an unknown name, or a load that the model cannot take.
    """
    if names is None:
        found: Sequence[Load] = [
            load for load in LOADS.values() if load.longest <= max_model_len and not load.named_only
        ]
        if not found:
            raise BadInput(f"every load is longer than the model's {max_model_len} tokens", where="bench")
        return list(found)
    chosen = []
    for name in dict.fromkeys(part.strip() for part in names.split(",")):
        if name not in LOADS:
            raise BadInput(f"no load {name!r}", where="--loads", do=f"choose from {', '.join(LOADS)}")
        load = LOADS[name]
        if load.longest > max_model_len:
            raise BadInput(
                f"{name} needs {load.longest} tokens, the model serves {max_model_len}",
                where="--loads",
                do="leave it out",
            )
        chosen.append(load)
    return chosen
