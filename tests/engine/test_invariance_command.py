"""The whole command: exit codes, JSON, and every engine on clean models (slow)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pilotage.accuracy.invariance import ENGINES, RELATIONS, invariance, plans
from pilotage.accuracy.invariance import bench as benches
from pilotage.core.nouns import Status

pytestmark = pytest.mark.engine

NEW = ("tiny:mistral", "tiny:gemma2", "tiny:mixtral", "tiny:qwen3_moe", "tiny:gpt_oss")


def command(*arguments: str, home: Path) -> tuple[int, Any, str]:
    done = subprocess.run(
        [sys.executable, "-m", "pilotage", "invariance", *arguments],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PILOTAGE_HOME": str(home)},
        timeout=580,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_command_passes_a_clean_model_and_prints_json(tmp_path: Path) -> None:
    code, said, error = command(
        "tiny:llama3", "--engine", benches.SHARP, "--relation", plans.HIT,
        "--engine", benches.DRAFTING, "--relation", plans.SPECULATION, "--json", home=tmp_path,
    )  # fmt: skip
    assert code == 0, error
    found = json.loads(said)
    assert found["status"] == "pass"
    assert {row["relation"] for row in found["relations"]} == {plans.HIT, plans.SPECULATION}
    drafted = [row for row in found["relations"] if row["relation"] == plans.SPECULATION]
    assert len(drafted) == 10 and all(row["status"] == "pass" and row["engine"] == benches.DRAFTING for row in drafted)
    assert found["matrix"][plans.SPECULATION] == {benches.DRAFTING: "pass"}
    assert found["matrix"][plans.HIT] == {benches.SHARP: "pass"}
    assert found["noise"]["float32"]["row_bound"] < 3e-5
    assert found["receipt"][benches.SHARP]["operators"]["segmented_attention"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tiny:gema3"], "gemma3"),
        (["tiny:llama3", "--relation", "chunks"], "chunking"),
        (["tiny:llama3", "--engine", "int4"], "float32, eager"),
        (["tiny:llama3", "--engine", benches.RANKS], "name both"),
    ],
)
def test_bad_input_is_one_clear_line(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pilotage import cli

    monkeypatch.setattr("sys.argv", ["pilotage", "invariance", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said, error = capsys.readouterr()
    assert ended.value.code == 2 and not said
    assert says in error and "Traceback" not in error


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["gemma3", "llama3"])
def test_every_engine_holds_every_relation(
    name: str, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILOTAGE_HOME", str(tmp_path))
    result = invariance(str(tiny(name)))
    wrong = [(r.relation, r.engine, r.condition, r.reason, r.broke[:1]) for r in result.results
             if r.status is not Status.PASS and r.counted]  # fmt: skip
    assert not wrong, wrong
    assert result.status is Status.PASS
    assert {r.engine for r in result.results} == set(ENGINES)
    assert {r.relation for r in result.results} == set(RELATIONS)
    server = [r for r in result.results if r.relation == plans.SERVER]
    assert [r.condition for r in server] == ["alone", "all at once", "tokens of a text"]
    assert server[0].expects == "bitwise"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["tiny:llama3", "tiny:gemma3", "tiny:qwen2", "tiny:qwen3", *NEW])
def test_no_false_alarm_over_models_and_seeds(name: str, seed: int) -> None:
    result = invariance(f"{name}@{seed}", engines=(benches.SHARP,))
    wrong = [(r.relation, r.condition, r.worst, r.reason) for r in result.results
             if r.status is not Status.PASS and r.counted]  # fmt: skip
    assert not wrong, wrong


@pytest.mark.slow
def test_a_fault_that_only_compiled_graphs_have_is_found(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a graph is traced the window is one page longer; eager runs are right."""
    import torch

    from pilotage.models.common.context import PagedContext

    monkeypatch.setenv("PILOTAGE_HOME", str(tmp_path))
    monkeypatch.setenv("PILOTAGE_COMPILE_CACHE", str(tmp_path / "graphs"))
    real = PagedContext.attend

    def attend(self: Any, layer: Any, q: Any, k: Any, v: Any, *, window: int | None = None, **how: Any) -> Any:
        if window is not None and torch.compiler.is_compiling():
            window += 32
        return real(self, layer, q, k, v, window=window, **how)

    monkeypatch.setattr(PagedContext, "attend", attend)
    result = invariance(
        str(tiny("gemma3")),
        engines=(benches.SERVED, benches.UNCOMPILED),
        relations=(plans.COMPILED, plans.CHUNKS, plans.REPETITION),
    )
    statuses = {r.relation: r.status for r in result.results}
    assert statuses[plans.COMPILED] is Status.FAIL
    assert statuses[plans.CHUNKS] is Status.PASS and statuses[plans.REPETITION] is Status.PASS
    first = result.broken[0].broke[0]
    assert first["position"] >= 16, "inside the window nothing is wrong"
