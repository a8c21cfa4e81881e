"""Every relation under every condition, as one result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pilotage.accuracy.invariance import plans
from pilotage.accuracy.invariance.judge import Result
from pilotage.accuracy.invariance.noise import Noise
from pilotage.accuracy.invariance.streams import Streams
from pilotage.core.nouns import Status, worst


@dataclass(frozen=True, kw_only=True)
class Invariance:
    """Every relation under every condition.

    Attributes:
        model: what was asked for.
        results: one for each condition of each engine.
        noise: by dtype.
        streams: the prompts.
        receipts: by engine, what ran in it.
        seconds: by part.
        command: the command line.
    """

    model: str
    results: list[Result]
    noise: dict[str, Noise]
    streams: dict[str, Streams]
    receipts: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    command: str = ""

    @property
    def status(self) -> Status:
        """What all relations came to; those about what the target does not have are not counted."""
        return worst([result.status for result in self.results if result.counted])

    @property
    def broken(self) -> list[Result]:
        return [result for result in self.results if result.status is Status.FAIL]

    def matrix(self) -> dict[str, dict[str, Status]]:
        """Return relation -> engine -> status of all conditions."""
        table: dict[str, dict[str, Status]] = {}
        for relation in plans.RELATIONS:
            for engine in dict.fromkeys(result.engine for result in self.results):
                found = [r.status for r in self.results if (r.relation, r.engine) == (relation, engine)]
                if found:
                    table.setdefault(relation, {})[engine] = worst(found)
        return table

    def to_json(self) -> dict[str, Any]:
        from pilotage.accuracy.validate import versions

        return {
            "model": self.model,
            "status": self.status.value,
            "matrix": {
                relation: {engine: status.value for engine, status in row.items()}
                for relation, row in self.matrix().items()
            },
            "relations": [result.to_json() for result in self.results],
            "noise": {
                dtype: {
                    "row": found.row,
                    "pooled": found.pooled,
                    "missing": found.missing,
                    "rows": found.rows,
                    "row_bound": found.row_bound,
                    "pooled_bound": found.pooled_bound,
                    "source": found.source,
                }
                for dtype, found in self.noise.items()
            },
            "streams": {
                engine: [
                    {"name": name, "prompt_tokens": prompt, "tokens": list(tokens)}
                    for name, prompt, tokens in zip(found.names, found.prompts, found.tokens, strict=True)
                ]
                for engine, found in self.streams.items()
            },
            "receipt": self.receipts,
            "seconds": {name: round(value, 2) for name, value in self.seconds.items()},
            "versions": versions(),
            "command": self.command,
        }
