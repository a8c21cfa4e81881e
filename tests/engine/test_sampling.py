"""Scores, seeds, grammars and forced tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import generate, prompts_of, tokens_of
from safetensors import safe_open

from pilotage.serving import launch

pytestmark = pytest.mark.engine

CONFIG = {"num_batched_tokens_buckets": [16, 48], "num_seqs_buckets": [1, 4], "max_prefill_seqs": 2}


@pytest.fixture(scope="module")
def served(tiny: Callable[..., Path]) -> Iterator[tuple[Path, Any]]:
    path = tiny("gemma3")
    with launch.engine(
        path, dtype="float32", enforce_eager=True, max_model_len=160, max_num_seqs=4, additional_config=CONFIG
    ) as llm:
        yield path, llm


def test_logprobs_of_outputs_and_prompts(served: tuple[Path, Any], oracle: Any) -> None:
    path, llm = served
    prompts = prompts_of((5, 48, 49, 110), seed=1)
    outputs = generate(llm, prompts, 6, logprobs=5, prompt_logprobs=3)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = [*prompt, *output.outputs[0].token_ids]
        expected = oracle(path).logits(tokens).log_softmax(-1)
        assert output.prompt_logprobs[0] is None
        for position in range(1, len(tokens)):
            if position < len(prompt):
                got = output.prompt_logprobs[position]
            else:
                got = output.outputs[0].logprobs[position - len(prompt)]
            assert tokens[position] in got
            for token, value in got.items():
                assert abs(value.logprob - float(expected[position - 1, token])) < 1e-4, position
            ranks = sorted(value.rank for value in got.values())
            assert ranks[0] == 1


def test_seeded_sampling_depends_on_the_seed_alone(served: tuple[Path, Any]) -> None:
    _, llm = served
    prompts = prompts_of((9, 60, 100, 20), seed=2)  # 60 and 100 tokens are prefilled in chunks
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 5, "top_p": 0.95, "top_k": 50}
    together = tokens_of(generate(llm, prompts, 20, **sampling))
    alone = [tokens_of(generate(llm, [prompt], 20, **sampling))[0] for prompt in prompts]
    assert together == alone
    other = tokens_of(generate(llm, prompts, 20, **{**sampling, "seed": 6}))
    assert all(mine != theirs for mine, theirs in zip(together, other, strict=True))


def test_sampling_options_of_vllm(served: tuple[Path, Any]) -> None:
    _, llm = served
    prompts = prompts_of((12, 40), seed=3)
    free = tokens_of(generate(llm, prompts, 12))
    banned = free[0][0]
    assert banned not in tokens_of(generate(llm, prompts, 12, logit_bias={banned: -100.0}))[0]
    penalised = tokens_of(generate(llm, prompts, 30, repetition_penalty=5.0, frequency_penalty=1.0))
    assert all(len(set(tokens)) > 20 for tokens in penalised)
    allowed = tokens_of(generate(llm, prompts, 5, allowed_token_ids=[17, 18]))
    assert {token for tokens in allowed for token in tokens} <= {17, 18}
    several = generate(llm, prompts[:1], 6, n=3, temperature=1.0, min_p=0.01)
    assert len({tuple(output.token_ids) for output in several[0].outputs}) > 1


def test_grammar(served: tuple[Path, Any]) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    _, llm = served
    outputs = generate(
        llm,
        prompts_of((10, 50), seed=4),
        24,
        ignore_eos=False,
        structured_outputs=StructuredOutputsParams(choice=["north", "south-west"]),
    )
    tokenizer = llm.get_tokenizer()
    said = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in tokens_of(outputs)]
    assert set(said) <= {"north", "south-west"}, said


def test_forced_tokens_and_recorded_logits(served: tuple[Path, Any], oracle: Any, tmp_path: Path) -> None:
    path, llm = served
    prompts = prompts_of((4, 30, 100), seed=5)
    forced = prompts_of((12, 10, 14), seed=6)
    from vllm import SamplingParams

    params = [
        SamplingParams(max_tokens=14, temperature=temperature, ignore_eos=True, extra_args={"pilotage_force": tokens})
        for tokens, temperature in zip(forced, (0.0, 1.0, 0.7), strict=True)
    ]
    llm.reset_prefix_cache()
    llm.collective_rpc("record_start", args=(str(tmp_path / "rows"),))
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    (files,) = llm.collective_rpc("record_stop")
    for output, tokens in zip(outputs, forced, strict=True):
        assert list(output.outputs[0].token_ids[: len(tokens)]) == tokens
        assert len(output.outputs[0].token_ids) == 14  # free after the forced ones

    names = json.loads((tmp_path / "rows" / "requests.json").read_text())
    rows: dict[tuple[str, int], torch.Tensor] = {}
    for file in files:
        with safe_open(file, "pt") as data:
            logits, positions, numbers = (data.get_tensor(key) for key in ("logits", "position", "request"))
        assert logits.dtype == torch.float32
        for row, position, number in zip(logits, positions.tolist(), numbers.tolist(), strict=True):
            assert (names[number], position) not in rows
            rows[names[number], position] = row
    for output, prompt in zip(outputs, prompts, strict=True):
        name = next(name for name in names if name.startswith(f"{output.request_id}-"))
        tokens = [*prompt, *output.outputs[0].token_ids]
        expected = oracle(path).logits(tokens)
        for position in range(len(tokens) - 1):
            got = rows[name, position]
            assert (got - expected[position]).abs().max() < 2e-4 * expected.abs().max(), (name, position)
    assert not any(llm.collective_rpc("record_stop"))


def test_a_wrong_force_is_refused(served: tuple[Path, Any]) -> None:
    from vllm.exceptions import VLLMValidationError

    _, llm = served
    with pytest.raises(VLLMValidationError, match="must be a list of token ids"):
        generate(llm, [[1, 2]], 2, extra_args={"pilotage_force": "abc"})
    with pytest.raises(VLLMValidationError, match="400 is not in the vocabulary"):
        generate(llm, [[1, 2]], 2, extra_args={"pilotage_force": [400]})
