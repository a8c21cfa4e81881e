"""Planning: commands, what they depend on, and the way of an unsupported architecture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pilotage.core import store
from pilotage.core.errors import BadInput, Unavailable
from pilotage.report.record import STAGES
from pilotage.voyage.course import Options, package_name, plot
from pilotage.voyage.embark import embark
from pilotage.voyage.rundir import RunDir

SUPPORTED = {"architecture": "LlamaForCausalLM", "model_type": "llama", "supported": True, "origin": "pilotage"}


def test_every_stage_is_planned_in_order_and_prints_json() -> None:
    legs = plot("tiny:llama3", SUPPORTED, Options(), Path("run"))
    assert [leg.stage for leg in legs] == [stage.name for stage in STAGES]
    for leg in legs:
        assert leg.result is not None or leg.command[-1] == "--json" or "pilotage.voyage.stage" in leg.command
        assert leg.result is not None or leg.shown


def test_options_reach_the_commands_and_the_fingerprint() -> None:
    options = Options(donor="qwen3", reference="/ref", peer_python="/peer/python")
    legs = {leg.stage: leg for leg in plot("m", SUPPORTED, options, Path("run"))}
    assert "tiny:qwen3" in legs["diff"].command
    assert legs["validate"].command[-3:] == ("--reference", "/ref", "--json")
    assert legs["bench"].command[-3:] == ("--peer-python", "/peer/python", "--json")
    plain = {leg.stage: leg for leg in plot("m", SUPPORTED, Options(), Path("run"))}
    for name in ("diff", "validate", "bench"):
        assert legs[name].depends != plain[name].depends
    assert legs["smoke"].depends == plain["smoke"].depends


def test_extra_checks_are_planned_only_when_asked_for() -> None:
    options = Options(reference="/ref", also=("localise", "invariance", "tasks"))
    legs = {leg.stage: leg for leg in plot("m", SUPPORTED, options, Path("run"))}
    assert list(legs)[-4:] == ["tasks", "invariance", "localise", "bench"]
    assert legs["tasks"].shown == "pilotage validate m --reference /ref --level 1"
    assert legs["localise"].shown == "pilotage localise m --reference /ref"
    # A relation of the served model to itself; another reference changes nothing about it.
    assert legs["invariance"].shown == "pilotage invariance m" and not legs["invariance"].depends
    with pytest.raises(BadInput, match="is a stage of every voyage"):
        embark("tiny:llama3", Options(also=("bench",)))
    with pytest.raises(BadInput, match="no stage is called 'invariants'"):
        embark("tiny:llama3", Options(also=("invariants",)))


def test_commands_are_quoted_as_one_would_type_them() -> None:
    legs = plot("/my models/x; rm -rf /", SUPPORTED, Options(), Path("run"))
    assert legs[3].shown == "pilotage weights '/my models/x; rm -rf /'"


@pytest.mark.parametrize(
    ("model_type", "expected"), [("olmo2", "olmo2"), ("gpt-oss", "gpt_oss"), ("2b", "model_2b"), ("Phi3.5", "phi3_5")]
)
def test_package_names(model_type: str, expected: str) -> None:
    assert package_name({"model_type": model_type, "architecture": "X"}) == expected


def write_config(directory: Path, **fields: object) -> Path:
    directory.mkdir()
    config = {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 320,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 2,
    }
    store.write_json(directory / "config.json", {**config, **fields})
    return directory


def test_an_unsupported_architecture_gets_a_diff_a_scaffold_and_what_to_do_next(tmp_path: Path) -> None:
    model, run = write_config(tmp_path / "olmo"), tmp_path / "run"
    command = [sys.executable, "-m", "pilotage", "onboard", str(model), "--run-dir", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "Olmo2ForCausalLM is not supported yet" in " ".join(done.stdout.split())
    diff = store.read_json(run / "0-diff.json")
    assert diff["status"] == "pass" and diff["result"]["work_items"]
    package = run / "scaffold" / "olmo2"
    assert (package / "model.py").is_file() and (run / "report.html").is_file()

    # A second voyage leaves what someone may have worked on.
    (package / "model.py").write_text("# my work\n")
    again = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    result = json.loads(again.stdout)
    assert again.returncode == 2 and result["status"] == "not_measured"
    assert (package / "model.py").read_text() == "# my work\n"
    stages = {stage["stage"]: stage for stage in result["stages"]}
    assert stages["diff"]["kept"] is True and "left as it was" in stages["implement"]["summary"]
    assert "has to be written first" in stages["validate"]["reason"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/no/such/model"], "/no/such/model"),
        (["tiny:llama3", "--skip", "vaildate"], "no stage is called 'vaildate'"),
        (["tiny:llama3", "--peer-python", "/no/python"], "/no/python: no such file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, arguments: list[str], said: str) -> None:
    command = [sys.executable, "-m", "pilotage", "onboard", *arguments, "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr
    assert not list((tmp_path / "run").glob("*.json")) if (tmp_path / "run").exists() else True


def test_a_second_voyage_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.prepare()
    with run.locked(), pytest.raises(Unavailable, match="another voyage is using"):
        embark("tiny:llama3", Options(), run_dir=run.path)


def test_a_run_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("x")
    with pytest.raises(BadInput, match="this is a file"):
        embark("tiny:llama3", Options(), run_dir=tmp_path / "run")
