"""What became of all cases, and whether the targets hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pilotage.core.nouns import Status

NAMED_TARGET = 0.95


@dataclass(frozen=True, kw_only=True)
class Report:
    """What became of all cases.

    Attributes:
        faults: one result for each planted fault, in the order of the table.
        clean: one for each clean run.
        engine: one for each fault whose logits came from the real engine; of these only detection is asked.
    """

    faults: list[dict[str, Any]] = field(default_factory=list)
    clean: list[dict[str, Any]] = field(default_factory=list)
    engine: list[dict[str, Any]] = field(default_factory=list)

    @property
    def missed(self) -> list[dict[str, Any]]:
        """Faults that fp32 can see and that nothing found."""
        return [found for found in (*self.faults, *self.engine) if found["fp32"] and not found["detected"]]

    @property
    def misnamed(self) -> list[dict[str, Any]]:
        """Detected faults of which the first culprit is another module."""
        return [found for found in self.faults if found["detected"] and not found["named_first"]]

    @property
    def false_alarms(self) -> list[dict[str, Any]]:
        """Clean runs in which something alarmed."""
        return [found for found in self.clean if found["alarms"]]

    @property
    def status(self) -> Status:
        """Pass where the targets hold: nothing missed, 95% named first, no false alarm."""
        if not (self.faults or self.clean or self.engine):
            return Status.NOT_MEASURED
        detected = [found for found in self.faults if found["detected"]]
        named = len(detected) - len(self.misnamed)
        bad = self.missed or self.false_alarms or named < NAMED_TARGET * len(detected)
        return Status.FAIL if bad else Status.PASS

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status.value,
            "faults": self.faults,
            "clean": self.clean,
            "engine": self.engine,
            "counts": {
                "faults": len(self.faults),
                "fp32_visible": sum(found["fp32"] for found in self.faults),
                "detected": sum(found["detected"] for found in self.faults),
                "missed": [found["id"] for found in self.missed],
                "misnamed": [found["id"] for found in self.misnamed],
                "engine": len(self.engine),
                "clean": len(self.clean),
                "false_alarms": [found["id"] for found in self.false_alarms],
            },
        }
