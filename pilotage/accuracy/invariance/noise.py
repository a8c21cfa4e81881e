"""How far apart two clean computations of the same rows may lie, measured on the model itself.

Hugging Face's model of the same checkpoint is run in the arm's dtype in ways that change nothing but the order of
sums: other chunks through its KV cache, another attention implementation, reordered channels, and row-parallel layers
summed in two rounded halves as two ranks would. What these differ by from one plain forward is the noise that a
relation between two conditions of the target is held against.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pilotage.accuracy import gates, metrics
from pilotage.accuracy.arms import hf, symmetry
from pilotage.accuracy.arms.base import Stream
from pilotage.accuracy.controls import digest
from pilotage.accuracy.invariance.rows import relative
from pilotage.core import store
from pilotage.core.errors import Unsupported
from pilotage.core.progress import track

# Part of the cache key: change it with anything that changes what is measured.
RECIPE = 2
CHUNKS = (64, 27, 11)
HALVED = ("o_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Relative differences of clean variants of one model, and the bounds that follow from them.

    Attributes:
        dtype: of the computation.
        row: by variant, the largest relative difference of a row of logits.
        pooled: by variant, the root mean square over all rows.
        missing: variants that could not be had, and why.
        rows: rows of logits behind each.
    """

    dtype: str
    row: dict[str, float]
    pooled: dict[str, float]
    missing: dict[str, str]
    rows: int

    @property
    def row_bound(self) -> float | None:
        """The relative difference that one more clean computation stays under at every row; None if unknown."""
        return self._bound(self.row, gates.MIN_EXTREME_SPREAD)

    @property
    def pooled_bound(self) -> float | None:
        """The same for the root mean square over many rows."""
        return self._bound(self.pooled, gates.MIN_CONTROL_SPREAD)

    def _bound(self, values: dict[str, float], spread: float) -> float | None:
        used = [value for value in values.values() if 0 < value < math.inf]
        if len(used) < gates.MIN_CONTROLS:
            return None
        return max(metrics.RMS_FLOOR, gates.control_bound(used, spread=spread))

    @property
    def source(self) -> str:
        """Where the bounds come from, in words."""
        return (
            f"99.9% prediction limit from {len(self.row)} clean variants of Hugging Face's {self.dtype} model "
            f"on {self.rows} rows"
        )


Variant = Callable[[Any, Stream], Tensor]


def _whole(model: Any, stream: Stream) -> Tensor:
    return hf.HFArm(model, "whole").observe([stream]).logits[0]


def _chunked(size: int) -> Variant:
    def run(model: Any, stream: Stream) -> Tensor:
        end = stream.positions[-1] + 1
        rows, cache = [], None
        for start in range(0, end, size):
            stop = min(end, start + size)
            wanted = [p - start for p in stream.positions if start <= p < stop]
            step = model(
                input_ids=torch.tensor([stream.tokens[start:stop]]),
                use_cache=True,
                past_key_values=cache,
                logits_to_keep=torch.tensor(wanted) if wanted else 1,
            )
            cache = step.past_key_values
            if wanted:
                rows.append(step.logits[0].float())
        return torch.cat(rows)

    return run


def _decoded(model: Any, stream: Stream) -> Tensor:
    return hf.HFArm(model, "cached", mode="cached").observe([stream]).logits[0]


def halve(model: Any) -> None:
    """Make the row-parallel layers of a Hugging Face model sum two rounded halves, as two ranks do.

    Raises:
        Unsupported: it has none under the usual names.
    """
    changed = 0
    for name, module in model.named_modules():
        if name.split(".")[-1] in HALVED and isinstance(module, torch.nn.Linear):
            object.__setattr__(module, "forward", _in_halves(module))
            changed += 1
    if not changed:
        raise Unsupported(f"no layers called {' or '.join(HALVED)}", where=type(model).__name__)


def _in_halves(module: torch.nn.Linear) -> Callable[[Tensor], Tensor]:
    middle = module.in_features // 2

    def forward(x: Tensor) -> Tensor:
        left = torch.nn.functional.linear(x[..., :middle], module.weight[:, :middle], module.bias)
        return left + torch.nn.functional.linear(x[..., middle:], module.weight[:, middle:])

    return forward


def _both(seed: int) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        symmetry.permute_hidden(model, seed)
        symmetry.permute_inner(model, seed)

    return change


# name -> (attention implementation, change of a copy of the model, how it is run)
VARIANTS: dict[str, tuple[str, Callable[[Any], None] | None, Variant]] = {
    "eager attention": ("eager", None, _whole),
    "token by token after the prompt": ("sdpa", None, _decoded),
    **{f"chunks of {size}": ("sdpa", None, _chunked(size)) for size in CHUNKS},
    "chunks of 27, eager attention": ("eager", None, _chunked(27)),
    "row-parallel layers in halves": ("sdpa", halve, _whole),
    "row-parallel layers in halves, chunks of 11": ("sdpa", halve, _chunked(11)),
    "channels reordered": ("sdpa", _both(3), _whole),
    "channels reordered, eager attention": ("eager", _both(4), _whole),
    "channels reordered, chunks of 27": ("sdpa", _both(8), _chunked(27)),
}


@torch.inference_mode()
def measure(path: Path, dtype: str, streams: Sequence[Stream]) -> Noise:
    """Measure the noise of a checkpoint's model in a dtype, or return what was measured before on the same rows.

    Args:
        path: the checkpoint.
        dtype: "bfloat16" or "float32".
        streams: prompts, continuations and positions.
    """
    import transformers

    key = [
        digest(path),
        dtype,
        [[list(stream.tokens), stream.prompt, list(stream.positions)] for stream in streams],
        [torch.__version__, transformers.__version__, torch.get_num_threads(), RECIPE],
    ]
    path_kept = store.keyed("noise", key)
    if (kept := store.kept(path_kept, lambda value: Noise(**value))) is not None:
        return kept
    found = _measure(hf.load(path, getattr(torch, dtype)), dtype, streams)
    store.write_json(path_kept, asdict(found))
    return found


def _measure(model: Any, dtype: str, streams: Sequence[Stream]) -> Noise:
    plain = [_whole(model, stream) for stream in streams]
    row: dict[str, float] = {}
    pooled: dict[str, float] = {}
    missing: dict[str, str] = {}
    for name, (attention, change, run) in track(VARIANTS.items(), f"noise of {dtype}", total=len(VARIANTS)):
        variant = copy.deepcopy(model) if change is not None else model
        before = model.config._attn_implementation
        try:
            if change is not None:
                change(variant)
            hf.set_attention(variant, attention)
            logits = [run(variant, stream) for stream in streams]
        except Unsupported as error:
            missing[name] = str(error)
            continue
        finally:
            model.set_attn_implementation(before)
        found = [
            relative(a, e) for got, want in zip(logits, plain, strict=True) for a, e in zip(got, want, strict=True)
        ]
        row[name] = max(found)
        pooled[name] = math.sqrt(math.fsum(value**2 for value in found) / len(found))
    return Noise(dtype=dtype, row=row, pooled=pooled, missing=missing, rows=sum(len(want) for want in plain))
