"""`pilotage weights`: what it prints, and what it says and returns when a checkpoint is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file


@pytest.fixture
def broken(tiny: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Copy a tiny checkpoint and let `change` edit its tensors."""

    def copy(name: str, change: Callable[[dict[str, torch.Tensor]], object] = lambda tensors: None) -> Path:
        path = tmp_path / "copy"
        shutil.copytree(tiny(name), path)
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path

    return copy


@pytest.mark.parametrize("name", ["llama3", "gemma3", "qwen2", "qwen3"])
def test_clean_checkpoints_pass(run: Callable, tiny: Callable[..., Path], name: str) -> None:
    code, out, _ = run("weights", str(tiny(name)), "--json")
    data = json.loads(out)
    assert code == 0 and data["status"] == "pass"
    counts = data["counts"]
    assert counts["loaded"] == counts["tensors"] == data["round_trip"]["compared"]
    assert counts["written_once"] == counts["parameters"]
    assert [verdict["status"] for verdict in data["verdicts"]] == ["pass"] * 3
    # Without their own tensor, tied heads are one parameter more than the checkpoint has tensors.
    tied = name in ("gemma3", "qwen2")
    assert counts["parameters"] == counts["tensors"] + tied


def test_the_table_folds_layers(run: Callable, tiny: Callable[..., Path]) -> None:
    code, out, _ = run("weights", str(tiny("gemma3")))
    assert code == 0
    assert "model.layers.0-5.self_attn.q_norm.weight" in out and "layers.3" not in out
    assert "same name, lm_head.weight" in out
    assert "80 tensors" in out and "81 of 81 parameters written once" in out


UP = "model.layers.2.mlp.up_proj.weight"
FAULTS = {
    "missing": ("llama3", lambda t: t.pop(UP), UP),
    "extra": ("llama3", lambda t: t.update({"model.layers.9.surprise": torch.zeros(2)}), "model.layers.9.surprise"),
    "misshapen": ("llama3", lambda t: t.update({UP: t[UP][:-1].contiguous()}), UP),
    "integers": ("llama3", lambda t: t.update({UP: t[UP].int()}), UP),
    "another head beside a tied one": (
        "gemma3",
        lambda t: t.update({"lm_head.weight": torch.zeros(320, 60)}),
        "lm_head",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_does_not_fit_fails_by_name(run: Callable, broken: Callable, fault: str) -> None:
    name, change, tensor = FAULTS[fault]
    path = broken(name, change)
    code, out, _ = run("weights", str(path))
    assert code == 1 and tensor in out and "fail" in out
    code, out, _ = run("weights", str(path), "--json")
    data = json.loads(out)
    assert code == 1 and data["status"] == "fail"
    assert any(problem["name"].startswith(tensor) for problem in data["problems"])


def test_an_old_checkpoints_inverse_frequencies_are_dropped_with_a_reason(run: Callable, broken: Callable) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    code, out, _ = run("weights", str(broken("llama3", lambda t: t.update({name: torch.zeros(10)}))), "--json")
    entry = next(tensor for tensor in json.loads(out)["tensors"] if tensor["key"] == name)
    assert code == 0 and entry["action"] == "drop" and entry["reason"]


def truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def edit_config(**fields: object) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | fields))

    return edit


UNUSABLE = {
    "truncated": (truncate, "model.safetensors: the file is truncated"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "holds no *.safetensors"),
    "no config": (lambda path: (path / "config.json").unlink(), "holds no config.json"),
    "broken config": (lambda path: (path / "config.json").write_text("{"), "config.json: not valid JSON"),
    "unknown type": (edit_config(model_type="lama"), "'lama' is not known"),
    "unserved": (
        edit_config(model_type="gpt2", architectures=["GPT2LMHeadModel"]),
        "no model package serves GPT2LMHead",
    ),
    "lost shard": (
        lambda path: (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors"),
        "a shard is missing",
    ),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_what_cannot_be_read_is_one_clear_line_and_exit_code_2(run: Callable, broken: Callable, case: str) -> None:
    spoil, message = UNUSABLE[case]
    path = broken("llama3")
    spoil(path)
    code, out, err = run("weights", str(path))
    assert code == 2 and out == ""
    assert message in err and str(path) in err and "Traceback" not in err
    assert len(err.strip().splitlines()) == 1


def test_a_directory_that_is_not_there(run: Callable, tmp_path: Path) -> None:
    code, out, err = run("weights", str(tmp_path / "nowhere"))
    assert code == 2 and out == "" and "nowhere: no such file or directory" in err
