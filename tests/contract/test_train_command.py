"""`pilotage train` as a user runs it: the example recipes, their outputs, and mistakes that are sentences."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from pilotage.core.errors import BadInput, ConfigError, Unavailable, Unsupported
from pilotage.training import metrics
from pilotage.training.recipe import Recipe
from pilotage.training.run import train

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "train"


def example(name: str, out: Path, **changes: Any) -> Path:
    """Copy an example's recipe, with another output and what else is given, beside what it names."""
    values = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    values |= {"out": str(out / "run"), **changes}
    for key in ("train", "evaluation"):
        values["data"][key] = [str(EXAMPLES / path) for path in values["data"].get(key, [])]
    path = out / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def run(*command: str) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_example_for_one_process_trains_adapters_that_merge(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    recipe = Recipe.from_file(example("finetune", tmp_path, steps=4, checkpoint={"every": 2}))
    outcome = train(recipe)
    assert outcome.steps == 4 and outcome.trainable < outcome.parameters / 4
    lines = metrics.read(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert "evaluation_loss" in lines[-1] and lines[-1]["evaluation_loss"] == outcome.evaluation
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))
    adapters = load_file(tmp_path / "run" / "checkpoints" / "step-00000004" / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.layers.") for name in adapters)

    base = AutoModelForCausalLM.from_pretrained(recipe_model())
    merged, info = AutoModelForCausalLM.from_pretrained(outcome.model, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    changed = {
        n for (n, p), q in zip(merged.named_parameters(), base.parameters(), strict=True) if not torch.equal(p, q)
    }
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "v_proj", "down_proj"}

    from peft import PeftModel

    ids = torch.arange(5, 25)[None]
    adapted = PeftModel.from_pretrained(base, tmp_path / "run" / "checkpoints" / "step-00000004")
    torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=0, atol=2e-5)


def recipe_model() -> Path:
    from pilotage.arch import source

    return source.resolve("tiny:llama3")


@pytest.mark.slow
@pytest.mark.distributed
def test_the_example_for_torchrun_runs_and_goes_on_elsewhere(tmp_path: Path) -> None:
    path = example(
        "torchrun", tmp_path, steps=2, checkpoint={"every": 1}, parallel={"tp": 2, "sequence_parallel": True}
    )
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    outcome = run(*torchrun, "-m", "pilotage", "train", str(path), "--json")
    assert outcome["steps"] == 2 and outcome["resumed_from"] == 0
    last = tmp_path / "run" / "checkpoints" / "step-00000002"
    for file in last.iterdir():  # as if the second step had never been
        file.unlink() if file.is_file() else [inner.unlink() for inner in file.iterdir()]
    alone = Recipe.from_file(example("torchrun", tmp_path, steps=2, parallel={}))
    again = train(alone)
    assert again.resumed_from == 1
    assert again.loss == pytest.approx(outcome["loss"], abs=2e-5)


@pytest.mark.slow
@pytest.mark.distributed
def test_the_example_for_four_processes_runs_as_it_is(tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone")
    outcome = run(*torchrun, "-m", "pilotage", "train", str(example("torchrun", tmp_path)), "--json")
    assert outcome["steps"] == 10


@pytest.mark.slow
@pytest.mark.distributed
def test_the_launch_on_several_machines_played_by_two_on_this_one(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NODES": "2",
        "RECIPE": str(example("multinode", tmp_path)),
        "OMP_NUM_THREADS": "1",
    }
    machines = [
        subprocess.Popen(
            [str(EXAMPLES / "multinode.sh"), "--json"],
            env={**environment, "NODE_RANK": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    said = [machine.communicate(timeout=300) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert json.loads(said[0][0])["steps"] == 10


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_a_pretrained_model_beats_the_trigram_serves_and_validates() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "prove_training.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["trained"]["evaluation"] < found["trigram"]["loss"]
    assert found["trained"]["parameters"] >= 1_000_000
    assert found["validated"]["status"] == "pass"
    assert found["served"]["text"] == found["round_trip"]["text"]
    assert found["round_trip"]["parameters_differing"] == []


def recipe(**changes: Any) -> dict[str, Any]:
    text = str(ROOT / "README.md")
    return {"out": "unused", "model": {"start": "tiny:llama3"}, "data": {"train": [text]}, "steps": 3, **changes}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stepz": 3}, 'unknown key "stepz"; did you mean "steps"?'),
        ({"optimizer": {"learning": 1}}, r'optimizer: unknown key "learning"; did you mean "'),
        ({"lora": {"ranks": 1}}, 'lora: unknown key "ranks"; did you mean "rank"?'),
        ({"data": {"train": ["a"], "train_hub": {"name": "b", "spilt": "c"}}}, 'did you mean "split"?'),
        ({"steps": "many"}, "steps: .*not 'many'"),
        ({"steps": 0}, "steps: .*greater than 0"),
        ({"model": {}}, "exactly one of start and config"),
        ({"model": {"config": {"model_type": "llama"}}}, "needs a tokenizer"),
        ({"schedule": {"warmup_steps": 3}}, "3 warm-up steps of 3"),
        ({"evaluation": {"every": 1}}, "nothing to evaluate on"),
        ({"model": {"start": "x", "dtype": "bfloat16", "autocast": True}}, "autocast is for float32"),
    ],
)
def test_a_mistake_in_a_recipe_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Recipe.from_dict(recipe(**changes))


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match='"steps" is missing'):
        Recipe.from_dict({key: value for key, value in recipe().items() if key != "steps"})


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"data": {"train": ["/no/such/*.txt"]}}, BadInput, "no such file"),
        ({"parallel": {"tp": 2}}, ConfigError, r"tp=2 does not fit 1 process.*--nproc-per-node 2"),
        ({"batch": {"rows": 3, "micro_rows": 2}}, ConfigError, "use a multiple of 2"),
        (
            {"data": {"train": [str(ROOT / "README.md")], "sequence_length": 4096}},
            ConfigError,
            "max_position_embeddings",
        ),
        ({"lora": {"targets": ["qproj"]}}, Unsupported, "no layer is called qproj"),
    ],
)
def test_what_a_run_cannot_do_is_said(changes: dict[str, Any], kind: type, said: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=said):
        train(Recipe.from_dict(recipe(**changes) | {"out": str(tmp_path)}))


@pytest.mark.parametrize(
    ("package", "changes"), [("peft", {"lora": {}}), ("datasets", {"data": {"train_hub": {"name": "x"}}})]
)
def test_a_missing_extra_is_named(
    package: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Unavailable, match=rf"{package} is not installed.*pilotage\[train\]"):
        train(Recipe.from_dict(recipe(**changes) | {"out": str(tmp_path)}))


def test_a_changed_recipe_is_not_continued(tmp_path: Path) -> None:
    small = {"data": {"train": [str(ROOT / "README.md")], "sequence_length": 32}, "out": str(tmp_path)}
    train(Recipe.from_dict(recipe(**small, steps=1)))
    with pytest.raises(ConfigError, match=r"optimizer changed since this run began.*--fresh"):
        train(Recipe.from_dict(recipe(**small, steps=1, optimizer={"lr": 1.0})))
    assert train(Recipe.from_dict(recipe(**small, steps=1, optimizer={"lr": 1.0})), fresh=True).resumed_from == 0
    assert train(Recipe.from_dict(recipe(**small, steps=1, optimizer={"lr": 1.0}))).resumed_from == 1
    with pytest.raises(BadInput, match="no checkpoint"):
        train(Recipe.from_dict(recipe(**small) | {"out": str(tmp_path / "new")}), resume=True)


def test_prompts_have_no_targets_and_lines_without_text_are_named(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from pilotage.training import sources
    from pilotage.training.recipe import DataSection

    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "two and two", "completion": " is four"}\n\n{"text": "whole"}\n')
    tokenizer = AutoTokenizer.from_pretrained(recipe_model())
    tokens = sources.tokenise(sources.read(file, DataSection()), tokenizer)
    first = tokens.ids[: tokens.starts[1]].tolist()
    learned = tokens.learned[: tokens.starts[1]]
    assert tokenizer.decode([t for t, flag in zip(first, learned, strict=True) if flag]) == " is four<eos>"
    assert tokens.learned[tokens.starts[1] :].all()
    file.write_text('{"text": "fine"}\n{"body": "?"}\n')
    with pytest.raises(BadInput, match=r"data.jsonl:2: no text under 'text'.*there is body"):
        list(sources.read(file, DataSection()))


def test_data_sets_are_read_through_datasets_or_said_to_be_out_of_reach(tmp_path: Path) -> None:
    from pilotage.training.recipe import HubData
    from pilotage.training.sources import hub_documents

    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    here = str(tmp_path / "set")
    assert list(hub_documents(HubData(name=here), "text")) == ["one", "two"]
    with pytest.raises(BadInput, match=r"Should be one of \['train'\]"):
        list(hub_documents(HubData(name=here, split="nosplit"), "text"))
    with pytest.raises(Unavailable, match=r"no/such: cannot be loaded.*name local files"):
        list(hub_documents(HubData(name="no/such"), "text"))
