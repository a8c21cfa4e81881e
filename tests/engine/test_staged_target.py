"""A target with inputs of its own: what changes between steps reaches a graph only by the copy before each run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import check_tokens, generate, prompts_of

from pilotage.serving import launch, targets
from pilotage.serving.batch import StepInputs

pytestmark = pytest.mark.engine
CONFIG = {"num_batched_tokens_buckets": [32], "num_seqs_buckets": [1, 4]}


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param({}, id="", marks=pytest.mark.slow),
        pytest.param({"on_device_sampling_config": {"all_greedy": True}}, id="sampling"),
    ],
)
def test_tokens_of_a_target_that_keeps_its_own_inputs(
    extra: dict[str, Any], tiny: Callable[..., Path], oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = dataclasses.replace(targets.TARGETS["cpu"], staged=True)
    monkeypatch.setitem(targets.TARGETS, "cpu", staged)
    sent: list[StepInputs] = []
    real = StepInputs.send
    monkeypatch.setattr(StepInputs, "send", lambda self: (sent.append(self), real(self))[1])
    path = tiny("gemma3")
    prompts = prompts_of((3, 20, 70, 49), seed=1)
    with launch.engine(
        path,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        enforce_eager=True,
        additional_config={**CONFIG, **extra},
    ) as llm:
        check_tokens(generate(llm, prompts, 12), [oracle(path).greedy(prompt, 12) for prompt in prompts])
    check_copies(sent)


@pytest.mark.slow
def test_tokens_of_a_target_whose_compiler_keeps_its_own_cache(
    tiny: Callable[..., Path], oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Neuron's does; here a backend of torch that is always there, in its place."""
    other = dataclasses.replace(targets.TARGETS["cpu"], staged=True, compiler="aot_eager")
    monkeypatch.setitem(targets.TARGETS, "cpu", other)
    path = tiny("gemma3")
    prompts = prompts_of((3, 20, 70, 49), seed=1)
    with launch.engine(path, dtype="float32", max_model_len=128, max_num_seqs=4, additional_config=CONFIG) as llm:
        (receipt,) = llm.collective_rpc("receipt")
        assert [row["name"] for row in receipt["buckets"]] == ["decode-1", "decode-4", "prefill-32"]
        check_tokens(generate(llm, prompts, 12), [oracle(path).greedy(prompt, 12) for prompt in prompts])


def check_copies(sent: list[StepInputs]) -> None:
    for inputs in sent[:3]:
        theirs = inputs.arguments()
        assert theirs["input_ids"].data_ptr() != inputs.input_ids.data_ptr()
        layer = next(name for name in theirs["attn_metadata"] if name.startswith("layers."))
        assert theirs["attn_metadata"][layer]["slot_mapping"] is not inputs.attn_metadata[layer]["slot_mapping"]
