"""`pilotage kernels`: what each verb prints and leaves with."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from pilotage.cli import kernels as command
from pilotage.core.errors import BadInput, PilotageError
from pilotage.functional import registry
from pilotage.kernels import bench as timing
from pilotage.kernels import table
from pilotage.kernels.table import call_for, explain

WRONG = """
import torch
import pilotage.functional as NF
NF.register("softcap", "loaded", lambda x, *, cap: x.clamp(-cap, cap), domain=NF.Domain(), priority=5, language="NKI",
            notes="a test")
"""


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("NKI_SIMULATOR", "TRITON_INTERPRET"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    yield
    registry._OPERATORS["softcap"].pop("loaded", None)
    registry._decide.cache_clear()


def run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    command.verb(app)
    app.command()(lambda: None)  # a second one, so that `kernels` is a command of its own
    done = CliRunner().invoke(app, ["kernels", *arguments])
    if isinstance(done.exception, PilotageError):
        raise done.exception
    return done.exit_code, done.stdout


def test_list_has_every_implementation_and_what_it_needs() -> None:
    code, printed = run("list", "--json")
    rows = {(row["operator"], row["implementation"]): row for row in json.loads(printed)}
    assert code == 0
    assert {(name, one.name) for name in registry.operators() for one in registry.implementations(name)} == set(rows)
    triton = rows["attention_decode", "triton"]
    assert (triton["language"], triton["targets"], triton["gradient"]) == ("Triton", ["cuda"], True)
    assert "N//K <= 64" in triton["limits"] and triton["notes"] == "not run on a GPU"
    if not torch.cuda.is_available():
        assert triton["here"] is not None and triton["here"].startswith("no cuda device")
    definition = rows["rms_norm", "torch"]
    assert definition["sharding"] == "that of its torch operators" and definition["here"] is None
    assert "rms_norm" in run("list", "rms_norm")[1]


def test_explain_judges_another_machine() -> None:
    code, printed = run("explain", "rms_norm", "--shape", "17,2048", "--dtype", "bf16", "--target", "cuda", "--json")
    told = json.loads(printed)
    assert code == 0
    assert told["tensors"] == {
        "x": {"shape": [17, 2048], "dtype": "bf16"},
        "weight": {"shape": [2048], "dtype": "bf16"},
    }
    first = next(row for row in told["rows"] if row["verdict"] == "runs")
    assert first["implementation"] == "triton"
    if not torch.cuda.is_available():
        assert "no cuda device" in first["here"]
    rows = {
        row["implementation"]: row
        for row in explain("rms_norm", call_for("rms_norm", shapes=["2,20000"], target="cuda"), "cuda")
    }
    assert rows["triton"]["why"].startswith("D is 20000, not <= 16384") and rows["torch"]["verdict"] == "runs"


def test_explain_fills_in_what_follows_and_keeps_leading_dimensions() -> None:
    call = call_for("mlp", shapes=["2,3,64", "gate_up_weight=20,64"], dtypes=["fp32"])
    assert call.tensors["down_weight"].shape == (64, 10)
    assert call.dims["T"] == 6
    paged = call_for(
        "attention_decode", dims=["T=4,N=8,K=2,H=128"], dtypes=["bf16", "k_cache=fp8"], options=["window=9"]
    )
    assert paged.tensors["k_cache"].shape[1:] == (2, 16, 128)
    assert paged.tensors["k_cache"].dtype == torch.float8_e4m3fn and paged["window"] == 9
    assert call_for("qkv_proj", dims=["N=8,K=2,H=16,D=32"])["sizes"] == (128, 32, 32)
    assert call_for("linear", shapes=["3,8", "bias=4"]).tensors["bias"].shape == (4,)


@pytest.mark.parametrize("target", ["cpu", "cuda", "neuron"])
def test_every_operator_can_be_explained_for_every_target(target: str) -> None:
    for operator in registry.operators():
        rows = explain(operator, call_for(operator, target=target), target)
        assert sum(row["verdict"] == "runs" for row in rows) == 1, (operator, rows)
        assert {row["implementation"] for row in rows} == {one.name for one in registry.implementations(operator)}


@pytest.mark.parametrize(
    ("operator", "words", "message"),
    [
        ("linear", {"shapes": ["3,17", "weight=64,18"]}, "D is 17 elsewhere, and 18 here; shapes are"),
        ("linear", {"shapes": ["wieght=3"]}, "no tensor named 'wieght'"),
        ("linear", {"shapes": ["3,x"]}, "'x' is no number"),
        ("linear", {"dims": ["D64"]}, "is not LETTER=NUMBER"),
        ("linear", {"dtypes": ["int3"]}, "no dtype named 'int3'"),
        ("linear", {"options": ["eps=3"]}, "is no option of it"),
        ("linear", {"target": "tpu"}, "no target named 'tpu'"),
    ],
)
def test_words_that_make_no_call_are_sentences(operator: str, words: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        call_for(operator, **words)


def test_check_leaves_with_1_for_a_wrong_kernel_and_2_for_none(tmp_path: Path) -> None:
    assert run("check", "softcap")[0] == 2
    file = tmp_path / "mine.py"
    file.write_text(WRONG)
    code, printed = run("check", "softcap", "--load", str(file), "--dtype", "fp32", "--json")
    told = json.loads(printed)
    assert code == 1 and told["status"] == "fail"
    (mine,) = told["implementations"]
    assert mine["implementation"] == "loaded" and mine["checks"]["values"] == "fail"
    assert mine["checks"]["written"] == "pass"
    registry._OPERATORS["softcap"].pop("loaded")
    file.write_text("raise KeyError('x')")
    with pytest.raises(BadInput, match="KeyError"):
        run("check", "softcap", "--load", str(file))


def test_bench_takes_ratios_within_a_round() -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.001
        return now

    code, _ = run("bench", "softcap", "--rounds", "1")
    assert code == 2, "nothing but the definition"
    results = timing.bench("experts", dims={"T": 1}, rounds=3, clock=clock)
    rows = {one.implementation: one for one in results}
    assert len(rows["chosen"].microseconds) == 3
    assert rows["torch"].ratio == (1.0, 1.0, 1.0)
    shown = rows["chosen"].to_json()
    assert set(shown["ratio"]) == {"median", "min", "max"} and shown["rounds"] == 3
    refused = {one.implementation: one.refused for one in timing.bench("rms_norm", rounds=1, clock=clock)}
    assert "nothing is timed" in str(refused["triton"])


def test_estimate_counts_a_kernel_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import nki, nki.isa as nisa, nki.language as nl\n"
        "@nki.jit\n"
        "def copied(x, times):\n"
        "    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)\n"
        "    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)\n"
        "    for _ in range(times):\n"
        "        nisa.dma_copy(dst=tile, src=x)\n"
        "    nisa.dma_copy(dst=out, src=tile)\n"
        "    return out\n"
    )
    once, thrice = (
        json.loads(run("estimate", f"{file}:copied", "--shape", "128,64", "--option", f"times={times}", "--json")[1])
        for times in (1, 3)
    )
    assert (once["dma_bytes"], thrice["dma_bytes"]) == (2 * 128 * 64 * 2, 4 * 128 * 64 * 2)
    assert once["label"] == "estimate" and once["assumptions"]
    with pytest.raises(BadInput, match="times not given"):
        run("estimate", f"{file}:copied", "--shape", "128,64")
    with pytest.raises(BadInput, match="only an operator has letters"):
        run("estimate", f"{file}:copied", "--shape", "128,64", "--dims", "T=3")


def test_estimate_of_an_operator_fills_in_what_is_not_given() -> None:
    with pytest.raises(BadInput, match=r"no operator with an NKI kernel is named 'rms'.*attention_decode.*write_kv"):
        run("estimate", "rms")
    with pytest.raises(BadInput, match="D is 9000, not <= 8192"):
        run("estimate", "rms_norm", "--shape", "2,9000")
    code, printed = run("estimate", "rms_norm", "--shape", "130,64", "--json")
    told = json.loads(printed)
    assert code == 0 and told["kernel"] == "rms_norm"
    assert told["dma_bytes"] == (2 * 130 * 64 + 130 * 64) * 2, "rows in and out, and the weight into every row"
    for operator in ("expert_affinities", "write_kv", "rotary"):
        assert json.loads(run("estimate", operator, "--json")[1])["dma_bytes"] > 0
    few, many = (
        json.loads(run("estimate", "attention_decode", "--dims", f"T=2,N=4,K=2,H=32,M={pages}", "--json")[1])
        for pages in (2, 16)
    )
    assert few["matmul_macs"] < many["matmul_macs"]


def test_a_file_that_is_not_there_is_a_sentence() -> None:
    with pytest.raises(BadInput, match="no such file"):
        table.load([Path("/no/such.py")])
