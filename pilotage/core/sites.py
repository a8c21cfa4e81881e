"""How places in a model are named, and how a user picks several of them.

A place is a module by its Hugging Face name and a site of it: its `output`, its `input`, or an inner tap, a value that
no module returns (`q_rope`, `heads`, ...). Written as one string it is `model.layers.0.mlp` for the output,
`model.layers.0.mlp.input` for the input and `model.layers.0.self_attn.q_rope` for an inner tap. That string is the name
that `tap` is called with, the key of captures and references, and the `module` and `site` of a `TensorKey`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pilotage.core.errors import ConfigError

# What each inner tap holds, for one row (token) of the step.
INNER = {
    "q": "queries as projected, [N, H]",
    "k": "keys as projected, [K, H]",
    "v": "values as projected, [K, H]",
    "q_rope": "queries as attention takes them: normalised and rotated, [N, H]",
    "k_rope": "keys as they are cached: normalised and rotated, [K, H]",
    "heads": "what attention returns, before o_proj, [N, H]",
    "mid": "the residual stream between attention and MLP, [D]",
    "router": "router logits before the top k, [E]",
    "experts": "weighted sum of the routed experts, [D]",
}


class Site(NamedTuple):
    """A place in a model.

    Attributes:
        module: Hugging Face module name.
        site: "output", "input" or a key of `INNER`.
    """

    module: str
    site: str

    def __str__(self) -> str:
        return self.module if self.site == "output" else f"{self.module}.{self.site}"


def parse(name: str) -> Site:
    """Read the one-string form; `.output` may be written out."""
    module, _, last = name.rpartition(".")
    if module and (last in INNER or last in ("input", "output")):
        return Site(module, last)
    return Site(name, "output")


def matcher(pattern: str) -> re.Pattern[str]:
    """Compile a pattern of site names.

    `*` stands for one part of a name, `**` for any number of them, `[0-3]` for the numbers 0 to 3 and `[0,2,5]` for
    those; all else is literal. `.output` may be written out.

    Raises:
        ConfigError: the brackets of a range do not hold numbers.
    """
    pattern = str(parse(pattern))
    parts = []
    for token in re.split(r"(\*\*|\*|\[[^\]]*\]?)", pattern):
        if token == "**":
            parts.append(r".+")
        elif token == "*":
            parts.append(r"[^.]+")
        elif token.startswith("["):
            parts.append(_numbers(token, pattern))
        else:
            parts.append(re.escape(token))
    return re.compile("".join(parts))


def _numbers(token: str, pattern: str) -> str:
    found: list[int] = []
    for item in token[1:-1].split(","):
        ends = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", item)
        if not token.endswith("]") or ends is None or (ends[2] is not None and int(ends[2]) < int(ends[1])):
            raise ConfigError(f"{token!r} is no range of numbers", where=pattern, do="write [0-3] or [0,2,5]")
        found += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    return f"(?:{'|'.join(map(str, found))})"


def select(patterns: Sequence[str], known: Iterable[str], *, where: str) -> list[str]:
    """Return the known sites that match any pattern, in the order in which they are known.

    Args:
        patterns: see `matcher`.
        known: names of all sites of the model, in its order.
        where: what the patterns are part of, for the error.

    Raises:
        ConfigError: a pattern that matches nothing; the nearest known name is in the message.
    """
    names = [str(parse(name)) for name in known]
    chosen: set[str] = set()
    for pattern in patterns:
        regex = matcher(pattern)
        found = {name for name in names if regex.fullmatch(name)}
        if not found:
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
            raise ConfigError(
                f"{pattern!r} matches no site of this model",
                where=where,
                do=f"the nearest is {near[0]!r}" if near else "this model has no sites",
            )
        chosen |= found
    return [name for name in names if name in chosen]
