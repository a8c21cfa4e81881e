"""Reference captures in files: every documented form, and nothing that could run code."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from pilotage.core.config import TargetConfig
from pilotage.core.errors import BadInput, ConfigError
from pilotage.model.neuron_config import TensorReplacementConfig
from pilotage.probe import load_replacer, save_reference
from pilotage.probe.reference import names_in

ROUTER = "model.layers.0.mlp.router"
PROMPTS = [[10, 20, 30], [40, 50]]
CAPTURES = [
    {ROUTER: [torch.arange(6.0).view(1, 3, 2), torch.arange(8.0).view(1, 4, 2)]},
    {ROUTER: [torch.ones(1, 2, 2)], "lm_head": [torch.zeros(1, 2, 5)]},
]


def check(path: Path, prompts: Path | None) -> None:
    found = load_replacer(path, prompts)
    assert found.modules == [ROUTER, "lm_head"] == names_in(path)
    assert found.register_request("a", [10, 20, 30, 9]) == 0 and found.register_request("b", [40, 50]) == 1
    context = found.build_context(["a", "b"], [3, 1, 0], False)
    assert context[ROUTER].tolist() == [[6, 7], [1, 1], [0, 0]]
    only = load_replacer(path, prompts, sites=[ROUTER], convert=lambda name, rows: rows.bfloat16())
    assert only.modules == [ROUTER] and only.row_types() == {ROUTER: ((2,), torch.bfloat16)}


def test_the_documents_files(tmp_path: Path) -> None:
    torch.save(CAPTURES, tmp_path / "tensors.pt")
    torch.save(PROMPTS, tmp_path / "prompts.pt")
    check(tmp_path / "tensors.pt", tmp_path / "prompts.pt")
    torch.save([torch.tensor([ids]) for ids in PROMPTS], tmp_path / "prompts.pt")  # as a tokenizer returns them
    check(tmp_path / "tensors.pt", tmp_path / "prompts.pt")
    (tmp_path / "prompts.json").write_text(json.dumps(PROMPTS))
    check(tmp_path / "tensors.pt", tmp_path / "prompts.json")
    with pytest.raises(BadInput, match="prompt_token_ids_path as well"):
        load_replacer(tmp_path / "tensors.pt")


def test_safetensors_know_their_prompts(tmp_path: Path) -> None:
    save_reference(tmp_path / "r.safetensors", CAPTURES, PROMPTS)
    check(tmp_path / "r.safetensors", None)


class Bomb:
    def __reduce__(self) -> Any:
        return (Path("/tmp/pilotage-bomb").touch, ())


def test_files_that_hold_code_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tensors.pt").write_bytes(pickle.dumps([Bomb()], protocol=2))
    with pytest.raises(BadInput, match="tensors and lists alone"):
        load_replacer(tmp_path / "tensors.pt", tmp_path / "prompts.pt")
    torch.save([Bomb()], tmp_path / "tensors.pt")
    with pytest.raises(BadInput, match="tensors and lists alone"):
        load_replacer(tmp_path / "tensors.pt", tmp_path / "prompts.pt")
    assert not Path("/tmp/pilotage-bomb").exists()


@pytest.mark.parametrize("name", ["missing.pt", "missing.safetensors", "missing.npz"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="no such file"):
        load_replacer(tmp_path / name)


def test_tensors_in_memory_become_a_file_and_json(tmp_path: Path) -> None:
    config = TensorReplacementConfig(tensors=CAPTURES, prompt_token_ids=PROMPTS, sites=[ROUTER])
    assert json.loads(json.dumps(config)) == dict(config), "vLLM hashes its configuration as JSON"
    again = copy.deepcopy(config)
    assert again == dict(config) and Path(again["tensors_path"]).exists(), "a copy in another process has the path"
    assert config.prompt_token_ids == PROMPTS and torch.equal(config.tensors[0][ROUTER][1], CAPTURES[0][ROUTER][1])
    target = TargetConfig.from_additional_config({"neuron_config": {"tensor_replacement": config}})
    assert target.tensor_replacement == dict(config)
    other = TensorReplacementConfig(reference_captures_path="a.pt", prompt_token_ids_path="b.pt")
    assert other == {"tensors_path": "a.pt", "prompt_token_ids_path": "b.pt"}
    for wrong in ({}, {"tensors": CAPTURES}, {"tensors": CAPTURES, "tensors_path": "a.pt"}):
        with pytest.raises(ConfigError):
            TensorReplacementConfig(**wrong)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"tensor_capture": {"site": ["a"]}}, 'did you mean "sites"'),
        ({"tensor_capture": {"path": "x"}}, "sites is missing"),
        ({"tensor_capture": {"sites": "model.layers.0"}}, "no list of patterns"),
        ({"tensor_capture": ["a"]}, "expected an object"),
        ({"tensor_replacement": {"prompt_token_ids_path": "x"}}, "sites is missing"),
        ({"tensor_replacement": {"tensors_path": 3}}, "not a path"),
        ({"tensor_replacement": {"tensors_path": "a", "reference_captures_path": "b"}}, "two files"),
    ],
)
def test_sections_are_checked(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TargetConfig.from_dict(section)


def test_the_other_name_of_the_path_is_the_same_setting() -> None:
    found = TargetConfig.from_dict({"tensor_replacement": {"reference_captures_path": "a.pt"}})
    assert found.tensor_replacement == {"tensors_path": "a.pt"}
