"""Clean controls of the KV cache: what Hugging Face itself caches with other sums, another attention, in chunks."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch

from pilotage.accuracy import error_laws, gates
from pilotage.accuracy.arms import hf, symmetry
from pilotage.accuracy.arms.base import Stream
from pilotage.accuracy.kv import Cache, KVSide, extremes, layers
from pilotage.core import store
from pilotage.core.errors import Unsupported
from pilotage.core.progress import track

# Part of the cache key of measured controls.
RECIPE = 1
ENOUGH = 8
# No multiples of a block or window size, and of different shapes to a matrix product.
CHUNKS = (27, 13, 41, 19, 7)
# An upper end of an interval beyond this is no clean computation of the model.
MAX_CONTROL = 2 * gates.MAX_CONTROL_RATIO


def side(model: Any, streams: Sequence[Stream], expected: Cache, baseline: Cache, key: Sequence[Any]) -> KVSide:
    """Measure controls of the cache of one dtype: the model with other orders of summation, attention and chunks.

    Args:
        model: Hugging Face's in this dtype; copied where a control changes it.
        streams: what to run.
        expected: of the fp32 reference.
        baseline: of the same model as it is.
        key: JSON values that name everything the controls depend on.
    """
    import transformers

    versions = [torch.__version__, transformers.__version__, torch.get_num_threads(), RECIPE, error_laws.RESAMPLES]
    tokens = [[list(stream.tokens), stream.prompt] for stream in streams]
    path = store.keyed("controls", [*key, "kv", tokens, versions])

    def read(value: Any) -> dict[str, dict[str, float]]:
        if len(value) < gates.MIN_CONTROLS or any(set(item) != {"high", "worst_row"} for item in value.values()):
            raise TypeError("these are not enough controls, or not controls")
        found: dict[str, dict[str, float]] = value
        return found

    if (kept := store.kept(path, read)) is not None:
        return KVSide(baseline=baseline, controls=kept, about={"from_cache": True})
    found, missing = measure(model, streams, expected, baseline)
    store.write_json(path, found)
    return KVSide(baseline=baseline, controls=found, about={"from_cache": False, "missing": missing})


def measure(
    model: Any, streams: Sequence[Stream], expected: Cache, baseline: Cache
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Run the controls; returns their statistics by name, and for each that could not be had the reason."""
    found: dict[str, dict[str, float]] = {}
    missing: dict[str, str] = {}
    variant = copy.deepcopy(model)
    # Hidden channels stay permuted, once more each time. An architecture that cannot have that has chunks.
    permuted = [(True, attention, chunk) for chunk in (None, *CHUNKS[:3]) for attention in ("sdpa", "eager")]
    chunked = [(False, attention, chunk) for chunk in CHUNKS for attention in ("sdpa", "eager")]
    for number, (permute, attention, chunk) in enumerate(track([*permuted, *chunked], "clean controls, KV cache")):
        if len(found) == ENOUGH:
            break
        name = f"{attention} attention, {f'chunks of {chunk}' if chunk else 'whole'}"
        if permute:
            name += f", hidden channels permuted {number + 1} times"
            try:
                symmetry.permute_hidden(variant, 100 + number)
            except Unsupported as error:
                missing[name] = str(error)
                continue
        hf.set_attention(variant, attention)
        cache = [hf.keys_values(variant, stream, chunk=chunk) for stream in streams]
        values = extremes(layers(cache, expected, baseline))
        if all(0 < value < math.inf for value in values.values()) and values["high"] <= MAX_CONTROL:
            found[name] = values
        else:
            missing[name] = f"not a clean computation: {values}"
    return found, missing
