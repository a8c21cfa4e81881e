"""Plant faults of training in real processes and ask the checks of `accuracy.train_checks` what they find."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pilotage.accuracy.faults.fault import Fault, Patch

CLEAN = ""  # stands for nothing planted


def measure(faults: Sequence[Fault], *, clean: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Examine a tiny model with each fault planted, one after another in the same processes.

    Args:
        faults: of subject "training".
        clean: tiny models that are examined with nothing planted.

    Returns:
        By the fault's id, or the clean model's name: `alarms` (JSON of `train_checks.Alarm`, the named one first) and
        `seconds`.
    """
    from torch.multiprocessing.spawn import spawn

    from pilotage.accuracy import train_checks

    cases = [(fault.id, fault.model) for fault in faults] + [(CLEAN, name) for name in clean]
    with tempfile.TemporaryDirectory(prefix="pilotage-train-faults-") as directory:
        spawn(_rank, args=(directory, cases), nprocs=train_checks.RANKS)
        found: dict[str, dict[str, Any]] = json.loads((Path(directory) / "found.json").read_text())
    return found


def _rank(rank: int, directory: str, cases: Sequence[tuple[str, str]]) -> None:
    from pilotage.accuracy import train_checks
    from pilotage.accuracy.faults.table import training
    from pilotage.arch import tiny

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    known = {fault.id: fault for fault in training.FAULTS}
    found = {}
    with train_checks.process_group(rank, f"{directory}/store"):
        for name, model in cases:
            began = time.perf_counter()
            path = tiny.build(model, overrides=training.OVERRIDES.get(model))
            with Patch() as patch:
                if name != CLEAN:
                    known[name].plant(patch)
                alarms = train_checks.examine(path)
            found[name or model] = {
                "alarms": [asdict(alarm) for alarm in alarms],
                "seconds": round(time.perf_counter() - began, 1),
            }
    if rank == 0:
        (Path(directory) / "found.json").write_text(json.dumps(found))


def result(fault: Fault, found: dict[str, Any]) -> dict[str, Any]:
    """Lay out what was found of a fault as `faults.run` keeps it."""
    alarms = found["alarms"]
    culprits = [
        {"module": alarm["culprit"], "site": alarm["check"], "key": alarm["culprit"], "what": alarm["what"]}
        for alarm in alarms
    ]
    named = [fault.names(culprit["key"]) for culprit in culprits]
    return {
        "detected": bool(alarms),
        "detected_by": list(dict.fromkeys(alarm["check"] for alarm in alarms)),
        "arms": {},
        "culprits": culprits[:10],
        "named_first": bool(named) and named[0],
        "named": any(named),
        "peers": {},
        "seconds": found["seconds"],
    }
