"""What an engine does around the model: the tokens that it feeds, and those that it answers.

No site shows these: a model that is fed another token computes it well. They are compared as they are, token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pilotage.accuracy.localise.blame import Culprit
from pilotage.accuracy.localise.score import LARGEST

RUNNER, SAMPLER = "runner", "sampler"
_WHAT = {
    "fed": "which tokens and positions are computed: what counts as computed after drafts that fell, where a chunk "
    "starts, what a cached prefix covers",
    "answered": "how tokens are chosen: the row of logits, the drafts that stand, the token after them",
}


@dataclass(frozen=True, kw_only=True)
class Misstep:
    """A token that should have been another one.

    Attributes:
        kind: "fed" to the model, or "answered".
        request, position: where.
        token: the one that was; -1 for none.
        due: the one that should have been.
    """

    kind: Literal["fed", "answered"]
    request: int
    position: int
    token: int
    due: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def culprits(missteps: Sequence[Misstep]) -> list[Culprit]:
    """Blame the part of the engine that makes each kind of them."""
    found = []
    for kind, module, site in (("fed", RUNNER, "inputs"), ("answered", SAMPLER, "tokens")):
        some = [step for step in missteps if step.kind == kind]
        if some:
            evidence = {"steps": [step.to_json() for step in some[:8]], "count": len(some)}
            found.append(
                Culprit(
                    module=module,
                    site=site,
                    key=f"{module}.{site}",
                    score=LARGEST,
                    what=_WHAT[kind],
                    kind=f"{module}.{site}",
                    layers=[],
                    also=[],
                    evidence={**evidence, "first_wrong_position": min(step.position for step in some)},
                )
            )
    return found
