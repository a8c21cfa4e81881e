"""Greedy steps of a served model skip logits that cannot be the largest, and say the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import generate, prompts_of, tokens_of

from pilotage.core.errors import Unsupported
from pilotage.kernels import cpu
from pilotage.serving import launch
from pilotage.serving.batch import StepInputs

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(cpu.unavailable() is not None, reason=f"no compiled kernels: {cpu.unavailable()}"),
]

CONFIG = {"num_batched_tokens_buckets": [16, 48], "num_seqs_buckets": [1, 4], "max_prefill_seqs": 2}
SHAPE = {"hidden_size": 80, "vocab_size": 1030}  # neither fills its last panel
# Cached prefixes would have a second run take other graphs, which in bf16 shows.
COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 160,
    "max_num_seqs": 4,
    "enable_prefix_caching": False,
}


@pytest.fixture(scope="module", params=["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def served(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> Iterator[Any]:
    path = tiny("qwen3", **SHAPE)
    config = {**CONFIG, "screen_lm_head": True}
    with launch.engine(path, **COMMON, enforce_eager=request.param == "eager", additional_config=config) as llm:
        yield llm


@pytest.fixture
def screened_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the steps that were told to compute the largest logits alone."""
    rows: list[int] = []
    real = StepInputs.want_likely

    def counted(inputs: StepInputs) -> None:
        rows.append(inputs.sampled)
        real(inputs)

    monkeypatch.setattr(StepInputs, "want_likely", counted)
    return rows


def test_tokens_are_those_of_all_logits(served: Any, screened_steps: list[int]) -> None:
    prompts = prompts_of((5, 48, 49, 110), seed=3)
    found = tokens_of(generate(served, prompts, 24))
    assert max(screened_steps) == 4 and len(screened_steps) > 24
    screened_steps.clear()
    assert found == tokens_of(generate(served, prompts, 24, logprobs=1))
    assert not screened_steps, "log-probabilities need every logit"


def test_left_out_logits_are_not_looked_at(served: Any, screened_steps: list[int]) -> None:
    """The copy is what a greedy step goes by: one that is wrong shows."""

    def spoil(model: torch.nn.Module) -> None:
        model.lm_head.screen.scale.zero_()
        model.lm_head.screen.bounds.zero_()

    def kept(model: torch.nn.Module) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in model.lm_head.screen.tensors()]

    (before,) = served.apply_model(kept)
    prompts = prompts_of((9, 20), seed=4)
    right = tokens_of(generate(served, prompts, 8))
    served.apply_model(spoil)
    try:
        wrong = tokens_of(generate(served, prompts, 8))
    finally:

        def restore(model: torch.nn.Module) -> None:
            for tensor, value in zip(model.lm_head.screen.tensors(), before, strict=True):
                tensor.copy_(value)

        served.apply_model(restore)
    assert wrong != right and tokens_of(generate(served, prompts, 8)) == right


@pytest.mark.parametrize(
    "asked",
    [{"temperature": 0.7, "seed": 1}, {"repetition_penalty": 1.3}, {"logit_bias": {7: 5.0}}, {"prompt_logprobs": 1}],
)
def test_who_needs_more_gets_all(served: Any, screened_steps: list[int], asked: dict[str, Any]) -> None:
    generate(served, prompts_of((20,), seed=5), 4, **{"temperature": 0.0, **asked})
    assert not screened_steps or (set(asked) == {"prompt_logprobs"} and len(screened_steps) == 3)


@pytest.mark.parametrize(("shape", "said"), [({"final_logit_softcapping": 30.0}, "capped"), ({}, "float32")])
def test_what_cannot_be_is_refused(shape: dict[str, Any], said: str, tiny: Callable[..., Path]) -> None:
    path = tiny("gemma2" if shape else "qwen3", **shape)
    dtype = "bfloat16" if shape else "float32"
    config = {**CONFIG, "screen_lm_head": True}
    with (
        pytest.raises(Unsupported, match=said),
        launch.engine(path, **{**COMMON, "dtype": dtype}, enforce_eager=True, additional_config=config),
    ):
        pass
