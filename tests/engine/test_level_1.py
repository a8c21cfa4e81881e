"""Level 1 through a server and an engine, and what it hands on to level 2."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pilotage.accuracy.arms import hf
from pilotage.accuracy.arms.openai import EchoingServer, ServerGenerate
from pilotage.accuracy.logits import logit_validation
from pilotage.accuracy.tasks.plan import TaskPlan, threshold
from pilotage.accuracy.validate import validate
from pilotage.core.nouns import Status

pytestmark = pytest.mark.engine

WORDS = ["harbour", "river", "pilot", "anchor", "lantern", "channel", "captain", "signal"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": f"{WORDS[i % 8]} {WORDS[i // 8 % 8]} {i}", "choices": WORDS[i % 5 : i % 5 + 3], "answer": i % 3}
        for i in range(120)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: rows.jsonl\ntest_split: test\n"
    (folder / "choose.yaml").write_text(
        "task: choose\n" + common + "output_type: multiple_choice\ndoc_to_text: '{{question}} is a'\n"
        "doc_to_choice: '{{choices}}'\ndoc_to_target: answer\nmetric_list:\n  - metric: acc\n"
    )
    (folder / "say.yaml").write_text(
        "task: say\n" + common + "output_type: generate_until\ndoc_to_text: '{{question}} is a'\n"
        "doc_to_target: '{{choices[answer]}}'\ngeneration_kwargs:\n  until: ['e', '.']\n  max_gen_toks: 5\n"
        "  do_sample: false\nmetric_list:\n  - metric: exact_match\n"
    )
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls of these models are measured here, without the ones that are compiled."""
    from pilotage.accuracy import controls

    monkeypatch.setenv("PILOTAGE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(controls, "CONTROLS", tuple(c for c in controls.CONTROLS if not c.compiled))


@pytest.mark.usefixtures("home")
@pytest.mark.slow
@pytest.mark.parametrize("through", ["engine", "server"])
def test_a_clean_model_answers_like_the_reference(through: Any, tiny: Callable[..., Path], tasks: Path) -> None:
    plan = TaskPlan(
        tasks=(str(tasks),),
        thresholds=(threshold("choose=0.1"), threshold("say=0.9")),
        through=through,
        dtype="float32",
    )
    result = validate(str(tiny("qwen3")), levels=(1,), tasks=plan, eager=True, arms=("float32",), kv=False)
    found = {task["task"]: task for task in result.tasks}
    assert [v["status"] for v in found["choose"]["verdicts"]] == ["pass", "pass"]
    assert found["choose"]["metrics"]["acc"]["n"] == 120
    assert found["choose"]["metrics"]["acc"]["difference"] == 0
    assert found["say"]["verdicts"][0]["status"] == "pass"
    assert found["say"]["verdicts"][1]["status"] == "fail"  # the user's threshold, which no tiny model meets
    # So what deviates most, if only by rounding, is looked at; and it is nothing.
    assert result.status is Status.FAIL
    assert all(arm.status is Status.PASS for arm in result.arms)


def faulty(original: Path, directory: Path) -> Path:
    """K and V of one layer change places."""
    shutil.copytree(original, directory)
    tensors = load_file(directory / "model.safetensors")
    k, v = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "kv")
    tensors[k], tensors[v] = tensors[v], tensors[k]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.usefixtures("home")
def test_what_deviates_becomes_the_prompts_of_level_2(tiny: Callable[..., Path], tasks: Path, tmp_path: Path) -> None:
    original = tiny("qwen3")
    checkpoint = faulty(original, tmp_path / "planted")
    plan = TaskPlan(tasks=(str(tasks / "choose.yaml"),), through="engine", dtype="float32", hand_on=3)
    result = validate(str(checkpoint), reference=str(original), levels=(1,), tasks=plan, eager=True, arms=("float32",))
    (task,) = result.tasks
    assert task["deviating"] and task["metrics"]["acc"]["better"] + task["metrics"]["acc"]["worse"] >= 3
    wanted = [item["prompt_tokens"] for item in task["deviating"][:3]]
    assert [list(stream.tokens[: stream.prompt]) for stream in result.streams] == wanted
    (arm,) = result.arms
    assert arm.status is Status.FAIL and result.status is Status.FAIL
    # The cache says where: keys of the first layer are right, those of the second are not.
    layers = {(layer["layer"], layer["kind"]): layer for layer in arm.kv["layers"]}
    assert layers["layers.0.self_attn", "k"]["ratio"] < 2
    assert layers["layers.1.self_attn", "k"]["ratio"] > 100


@pytest.mark.slow
def test_a_server_as_a_source_of_logits(tiny: Callable[..., Path]) -> None:
    from pilotage.serving import launch

    path = tiny("gemma3")
    model = hf.load(path, torch.float32)
    ids = torch.tensor([[2, 40, 41, 42], [2, 77, 78, 79]])
    expected, _ = hf.generate(model, ids, 8)
    with launch.server(path, dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=4) as server:
        for kind in (ServerGenerate, EchoingServer):
            result = logit_validation(ids, kind(server.url, steps=8, top_k=5), expected, {3: 1e-4}, dtype=torch.float32)
            assert result.measured is Status.PASS, [v.to_json() for v in result.verdicts]
            assert result.verdicts[-1].status is Status.NOT_MEASURED


@pytest.fixture(scope="module")
def gemma() -> Path:
    from pilotage.arch import source

    os.environ.pop("PILOTAGE_HOME", None)
    return source.resolve("gemma3-270m")


@pytest.mark.slow
@pytest.mark.real_weights
@pytest.mark.timeout(900)
def test_our_own_task_on_gemma3_270m_served_and_by_hugging_face(gemma: Path) -> None:
    result = validate(str(gemma), levels=(1,), arms=("bfloat16",))
    (task,) = result.tasks
    found = task["metrics"]["exact_match"]
    assert task["task"] == "pilotage_capitals" and found["n"] >= 200
    assert 0.2 < found["reference"] < 0.8
    assert 0.2 < found["target"] < 0.8
    assert result.status is Status.PASS, task["verdicts"]


@pytest.mark.slow
@pytest.mark.real_weights
@pytest.mark.timeout(900)
def test_a_planted_fault_drops_the_score_of_gemma3_270m(gemma: Path, tmp_path: Path) -> None:
    """The q and k norms multiply by their stored weight instead of one plus it."""
    directory = tmp_path / "planted"
    shutil.copytree(gemma, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(gemma / "model.safetensors")
    for name in tensors:
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            tensors[name] -= 1
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    plan = TaskPlan(through="engine", hand_on=2)
    result = validate(str(directory), reference=str(gemma), levels=(1,), tasks=plan, eager=True, arms=("bfloat16",))
    (task,) = result.tasks
    found = task["metrics"]["exact_match"]
    assert task["verdicts"][0]["status"] == "fail"
    assert found["p_value"] < 1e-3 and found["difference"] < -0.1
    assert result.arms[0].status is Status.FAIL
