"""What `pilotage localise` prints: names that can be copied, however narrow the terminal."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any, cast

from rich.console import Console

from pilotage.cli import localise


def test_names_of_modules_are_whole_in_80_columns() -> None:
    name = "model.language_model.layers.17.block_sparse_moe.shared_experts"
    culprit = SimpleNamespace(
        module=name,
        site="experts",
        score=1234.5,
        what="the sum over experts has another order than the reference's",
        evidence={"arm": "float32", "wrong_rows_by_phase": {"prefill": 0.5}, "first_wrong_position": 16},
    )
    out = io.StringIO()
    Console(file=out, width=80).print(localise._culprits(cast(Any, SimpleNamespace(culprits=[culprit]))))
    assert name in out.getvalue()
