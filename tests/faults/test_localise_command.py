"""`pilotage localise` as a command: what it prints, its JSON and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from planted import FAULTS


def command(home: Path, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "pilotage", "localise", *arguments],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PILOTAGE_HOME": str(home)},
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_fault_is_named_in_json(tiny: Callable[..., Path], tmp_path: Path, one_home: Path) -> None:
    fault = next(fault for fault in FAULTS if fault.name == "window one longer")
    original = tiny("gemma3")
    checkpoint = fault.plant(original, tmp_path / "planted")
    code, out, _ = command(one_home, str(checkpoint), "--reference", str(original), "--arm", "float32", "--json")
    assert code == 1
    found: dict[str, Any] = json.loads(out)
    assert found["status"] == "fail"
    first = found["culprits"][0]
    assert (first["module"], first["site"]) == ("model.layers.0.self_attn", "heads")
    assert first["score"] > 1000 and first["layers"] == [0, 1, 3, 4]
    assert first["evidence"]["first_wrong_position"] == 16
    assert first["evidence"]["config"] == {"sliding_window": {"target": 17, "reference": 16}}
    assert found["causal"]["first_restores"] and found["causal"]["all_restore"]
    (arm,) = found["arms"]
    assert {site["site"] for site in arm["sites"]} >= {"model.embed_tokens", "model.layers.5.mlp", "lm_head", "logits"}


def test_a_clean_model_is_none_in_words(tiny: Callable[..., Path], one_home: Path) -> None:
    code, out, _ = command(one_home, str(tiny("qwen2")), "--arm", "float32")
    assert code == 0
    assert ": none" in out and "sites scored" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tiny:gema3"], "gemma3"),
        (["tiny:gemma3", "--arm", "int4"], "float32 or bfloat16"),
        (["tiny:gemma3", "--ranks", "2"], "add --engine"),
        (["tiny:gemma3", "--condition", "/nowhere.json"], "no such file"),
    ],
)
def test_bad_input_is_one_clear_line(
    arguments: list[str], says: str, said: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, error = said("localise", *arguments)
    assert code == 2 and not out
    assert says in error and "Traceback" not in error
