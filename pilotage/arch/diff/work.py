"""Work items: what has to be written to get from the donor model to the new one.

A rule looks at both models and says whether there is something to do; it never asks which models they are. Rules stand
in the `work_*` modules, in the order of the checklist; `work_rest` reports what no rule explained.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pilotage.arch.diff.side import Side
from pilotage.arch.diff.traits import Traits, traits

ATTENTION = "Attention method"
LAYERS = "Heterogeneous layers"
POSITION = "Position encoding"
MLP = "MLP/Activation"
NORM = "Normalization"
CONFIG = "Config structure"
EMBEDDING = "Embedding"
SPECIAL = "Special features"
ROWS = (ATTENTION, LAYERS, POSITION, MLP, NORM, CONFIG, EMBEDDING, SPECIAL)

# Places of a model package that rules name; a class stands without the model's prefix.
ATTENTION_INIT = "model.py: Attention.__init__"
ATTENTION_FORWARD = "model.py: Attention.forward"
MLP_INIT = "model.py: MLP.__init__"
MLP_FORWARD = "model.py: MLP.forward"
LAYER_INIT = "model.py: DecoderLayer.__init__"
LAYER_FORWARD = "model.py: DecoderLayer.forward"
MODEL_INIT = "model.py: Model.__init__"
MODEL_FORWARD = "model.py: Model.forward"
HEAD_INIT = "model.py: ForCausalLM.__init__"
HEAD_FORWARD = "model.py: ForCausalLM.compute_logits"
FROM_CONFIGS = "config.py: Config.from_configs"
WEIGHT_MAP = "weights.py: weight_map"


@dataclass(frozen=True, kw_only=True)
class WorkItem:
    """One thing to write.

    Attributes:
        title: what it is, short.
        row: the checklist row it belongs to.
        touches: the places of a model package to write, "file: Class.function", joined by "; ".
        why: what in the two models says so.
        reads: fields of `ArchSpec` that the model's config needs for it.
        claims: names of modules or parameters that it explains, as regular expressions.
    """

    title: str
    row: str
    touches: str
    why: str
    reads: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()

    @property
    def places(self) -> tuple[tuple[str, str], ...]:
        """The touched places as (file, "Class.function") pairs."""
        pairs = (place.split(": ", 1) for place in self.touches.split("; "))
        return tuple((file, function) for file, function in pairs)

    def to_json(self) -> dict[str, Any]:
        return {"title": self.title, "row": self.row, "touches": self.touches, "why": self.why}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The donor (a) and the new model (b), with their traits."""

    a: Side
    b: Side
    ta: Traits = field(init=False)
    tb: Traits = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ta", traits(self.a))
        object.__setattr__(self, "tb", traits(self.b))

    def new(self, name: str, nothing: Any = None) -> bool:
        """A spec field that says nothing for the donor and something for the new model."""
        a, b = getattr(self.a.spec, name), getattr(self.b.spec, name)
        return (a == nothing or not a) and b != nothing and bool(b)

    def gone(self, name: str, nothing: Any = None) -> bool:
        """A spec field that says something for the donor and nothing for the new model."""
        a, b = getattr(self.a.spec, name), getattr(self.b.spec, name)
        return (b == nothing or not b) and a != nothing and bool(a)


Rule = Callable[[Pair], Iterable[WorkItem]]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    """Add a rule to the table."""
    RULES.append(function)
    return function


def item(
    row: str,
    places: str | tuple[str, ...],
    title: str,
    why: str,
    *,
    reads: tuple[str, ...] = (),
    claims: tuple[str, ...] = (),
) -> WorkItem:
    """Make a work item of one or more places."""
    touches = places if isinstance(places, str) else "; ".join(places)
    return WorkItem(title=title, row=row, touches=touches, why=why, reads=reads, claims=claims)


def work_items(pair: Pair) -> list[WorkItem]:
    """Every item that the rules find, in checklist order."""
    # Imported for their rules, in checklist order.
    from pilotage.arch.diff import work_attention, work_blocks, work_layers, work_model, work_rest

    assert work_attention and work_blocks and work_layers and work_model
    found = [found for each in RULES for found in each(pair)]
    found.extend(work_rest.unexplained(pair, found))
    return sorted(found, key=lambda item: ROWS.index(item.row))


def claimed(name: str, items: Iterable[WorkItem]) -> bool:
    """Whether an item explains a module or parameter of this name."""
    return any(re.fullmatch(claim, name) for found in items for claim in found.claims)


def children(layers: Iterable[Any]) -> Iterator[str]:
    """Names of everything inside the layers, relative to the layer."""
    for layer in layers:
        for path, node in layer.walk():
            if path:
                yield path
            yield from (f"{path}.{name}" if path else name for name in node.shapes)
