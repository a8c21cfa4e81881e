"""Proof from the configs that a checkpoint describes the same function as its reference.

Some faults are below any measurement: a wrong norm epsilon under large activations changes no bit. The ArchSpec shows
them whatever the activations are.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from pilotage.core.nouns import Status, Verdict

if TYPE_CHECKING:
    from pilotage.arch.spec import ArchSpec

# Fields that a converted checkpoint may change without computing anything else: how weights are stored, how far the
# context is said to reach, which ids mean what to the server.
NOT_SEMANTIC = frozenset(
    {
        "max_position",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "modalities",
        "quantization",
        "num_mtp_layers",
    }
)


def _plain(value: Any) -> Any:
    """Reduce a field's value to what can be compared and written as JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # `raw` is the source text of the other fields; two spellings of one rope are the same rope.
        return {
            item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value) if item.name != "raw"
        }
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def config_verdict(target: ArchSpec, reference: ArchSpec) -> Verdict:
    """Compare every field of two specs that changes what the model computes.

    Args:
        target: of the checkpoint under test.
        reference: of the checkpoint it must agree with.

    Returns:
        A verdict whose evidence lists each differing field with both values.
    """
    names = sorted((set(target.fields) | set(reference.fields)) - NOT_SEMANTIC)
    differing = {}
    for name in names:
        values = [_plain(spec.fields[name].value) if name in spec.fields else None for spec in (target, reference)]
        if values[0] != values[1]:
            differing[name] = {"target": values[0], "reference": values[1]}
    return Verdict(
        claim="the configuration describes the same computation as the reference's",
        metric="differing_fields",
        estimate=float(len(differing)),
        bound=0.0,
        bound_source="a field that changes the computation must be equal",
        n=len(names),
        status=Status.FAIL if differing else Status.PASS,
        evidence={"differing": differing},
    )
