"""`pilotage validate --train`: it passes what is right, and names the parameter where it is not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pilotage.accuracy import training, training_cases
from pilotage.accuracy.training_cases import Step
from pilotage.core.nouns import Status
from pilotage.models.llama3.hf import LlamaForCausalLM

Tiny = Callable[..., Path]


def step(**changed: Any) -> Step:
    generator = torch.Generator().manual_seed(0)
    gradients = {name: torch.randn(6, 5, generator=generator) for name in ("embed", "norm", "head")}
    found = Step(logits=torch.randn(7, 9, generator=generator), loss=2.5, gradients=dict(gradients))
    for name, value in changed.items():
        if name in gradients:
            found.gradients[name] = value
        else:
            setattr(found, name, value)
    return found


def failing(found: Step) -> list[str]:
    result = training.compare("float32", "case", found, step(), step())
    return [entry["parameter"] for entry in result.parameters if entry["status"] == "fail"]


def test_a_gradient_that_is_halved_lost_or_new_is_named() -> None:
    right = step().gradients["embed"]
    assert right is not None
    assert failing(step()) == []
    assert failing(step(embed=right * 0.5)) == ["embed"]
    assert failing(step(embed=None)) == ["embed"]
    assert failing(step(embed=right.masked_fill(torch.arange(6)[:, None] == 3, float("nan")))) == ["embed"]
    extra = step()
    extra.gradients["more"] = torch.ones(2, 2)
    assert failing(extra) == ["more"]
    assert training.compare("float32", "case", step(loss=2.6), step(), step()).status is Status.FAIL
    assert training.compare("float32", "case", step(), step(), step()).status is Status.PASS


def test_one_row_is_not_judged_by_where_its_rounding_points() -> None:
    """As `torch.compile` rounds the gradient of a norm: no further off than the baseline, but along the gradient."""
    right, across = torch.tensor([3.0, 4.0, 0.0]), torch.tensor([4.0, -3.0, 0.0])

    def vector(value: torch.Tensor) -> Step:
        return Step(logits=step().logits, loss=2.5, gradients={"norm": value})

    for factor, expected in ((1 + 2e-6, Status.PASS), (1 + 4e-5, Status.FAIL)):
        result = training.compare(
            "float32", "case", vector(right * factor), vector(right), vector(right + 4e-6 * across)
        )
        assert result.status is expected, result.parameters


def test_few_elements_are_judged_with_their_like_in_other_layers() -> None:
    generator = torch.Generator().manual_seed(5)
    names = [f"layers.{index}.sinks" for index in range(4)]
    sizes = (1.0, 1e3, 1.0, 1.0)
    right = {name: size * torch.randn(6, generator=generator) for name, size in zip(names, sizes, strict=True)}

    def off(error: float) -> Step:
        noisy = {name: v + error * v.norm() * torch.randn(6, generator=generator) for name, v in right.items()}
        return Step(logits=step().logits, loss=2.5, gradients=dict(noisy))

    truth, other = Step(logits=step().logits, loss=2.5, gradients=dict(right)), off(0.01)
    for found, expected in ((off(0.01), Status.PASS), (off(0.1), Status.FAIL)):
        result = training.compare("bfloat16", "case", found, truth, other)
        assert {entry["status"] for entry in result.parameters} == {expected.value}


def test_a_token_that_takes_another_expert_is_measured_by_what_that_does_elsewhere() -> None:
    right = step().gradients["embed"]
    assert right is not None
    close = step(embed=right + 0.01 * torch.randn(6, 5, generator=torch.Generator().manual_seed(1)))
    found = step(embed=right + 0.2 * right.roll(1))
    for noise, expected in (({"embed": 0.25}, Status.PASS), ({"embed": 0.1}, Status.FAIL)):
        result = training.compare("bfloat16", "case", found, step(), close, routed=True, noise=noise)
        assert result.parameters[0]["status"] == expected.value


class LosesAPath(LlamaForCausalLM):
    """The first norm passes no gradient on: the embedding keeps the residual path only."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model.layers[0].input_layernorm.register_forward_pre_hook(lambda norm, args: (args[0].detach(),))


class DividesByItsOwnTokens(LlamaForCausalLM):
    """Micro-batches are averaged, each by its own number of tokens."""

    def forward(self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if num_items_in_batch is not None:
            output.loss = output.loss / len(training_cases.MICRO_BATCHES)
        return output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "cases", "parameters"),
    [(LosesAPath, 5, {"model.embed_tokens.weight"}), (DividesByItsOwnTokens, 1, None)],
)
def test_planted_faults_fail_where_they_are(
    cls: type[nn.Module], cases: int, parameters: set[str] | None, tiny: Tiny
) -> None:
    found = training.validate_training(str(tiny("llama3")), arms=("float32",), compiled=False, training_class=cls)
    bad = [case for case in found.cases if case.status is Status.FAIL]
    assert len(bad) == cases
    for case in bad if parameters is not None else []:
        assert {entry["parameter"] for entry in case.parameters if entry["status"] == "fail"} == parameters
        assert all(v.status is Status.PASS for v in case.verdicts if v.metric == "absolute_error")
    assert parameters is not None or bad[0].case == "accumulation over micro-batches"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "llama3",
        "qwen2",
        "qwen3",
        "gemma3",
        "gemma2",
        "gemma4",
        "mistral",
        "mixtral",
        "qwen3_moe",
        "gpt_oss",
        "deepseek_v3",
    ],
)
def test_every_face_passes_in_both_dtypes(name: str, tiny: Tiny) -> None:
    found = training.validate_training(str(tiny(name)), compiled=name in ("llama3", "gemma3"))
    bad = [verdict for case in found.cases for verdict in case.verdicts if verdict.status is Status.FAIL]
    assert not bad, bad[0]
    assert found.status is Status.PASS, [
        v.claim for c in found.cases for v in c.verdicts if v.status is not Status.PASS
    ]


@pytest.mark.slow
def test_the_command_prints_json_and_leaves_with_its_code(tiny: Tiny) -> None:
    command = [sys.executable, "-m", "pilotage", "validate", "--train", str(tiny("llama3")), "--arm", "float32"]
    done = subprocess.run([*command, "--eager", "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["status"] == "pass" and result["training_class"].endswith("llama3.hf.LlamaForCausalLM")
    assert {case["case"] for case in result["cases"]} == {
        "padding on the left",
        "padding on the right",
        "packed sequences",
        "gradient checkpointing",
        "accumulation over micro-batches",
    }
    assert all(len(case["parameters"]) == 39 for case in result["cases"])
    wrong = subprocess.run([*command, "--level", "2"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "--level --train" in wrong.stderr


def test_of_a_wide_vocabulary_an_even_choice_of_real_rows_is_compared() -> None:
    wide = training_cases.MOST_LOGITS // 4
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    case = training_cases.Case(name="any", inputs={"input_ids": torch.zeros(2, 5).long(), "attention_mask": mask})
    logits = torch.arange(10.0).reshape(2, 5, 1).bfloat16()
    assert case.compared(logits)[:, 0].tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert case.compared(logits.expand(2, 5, wide))[:, 0].tolist() == [2, 4, 7, 9]
