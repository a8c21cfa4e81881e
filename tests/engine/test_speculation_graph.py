"""Drafts that the graph itself verifies, by what it samples in their places; and rows of drafts under replacement."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_replacement as replacement
import torch
from conftest import check_tokens, generate, prompts_of, tokens_of
from test_speculation import DRAWS, NGRAM, WIDE, check_pairs, drafts, engine, noisy, repeating

from pilotage.core.errors import PilotageError
from pilotage.probe import CaptureWriter
from pilotage.serving import launch

pytestmark = pytest.mark.engine


GRAPH = {**WIDE["additional_config"], "on_device_sampling_config": {}}


def test_the_graph_samples_and_verifies(tiny: Callable[..., Path], oracle: Any) -> None:
    """Each token has its own random number: the tokens of a seed are those without drafts, one for one."""
    path = tiny("gemma3")
    prompts = repeating(seed=29)
    seeded: dict[str, Any] = {"temperature": 0.5, "seed": 5, "top_p": 0.95, "top_k": 40}
    with launch.engine(
        path, dtype="float32", enforce_eager=True, max_model_len=160, max_num_seqs=16, additional_config=GRAPH
    ) as llm:
        expected = tokens_of(generate(llm, prompts, 24, **seeded))
    with engine(path, NGRAM, max_num_seqs=16, additional_config=GRAPH) as llm:
        references = [oracle(path).greedy(prompt, 24) for prompt in prompts]
        check_tokens(generate(llm, prompts, 24), references)
        operators = llm.collective_rpc("receipt")[0]["operators"]
        assert "sample_tokens" in operators
        before = drafts(llm)
        assert 0 < before[1] < before[0]
        assert tokens_of(generate(llm, prompts, 24, **seeded)) == expected
        assert drafts(llm)[1] > before[1], "drafts of samples stood as well"
        check_others_beside(llm, path, oracle, prompts, expected, seeded)
        check_named_drafts(llm, path, oracle)


def check_others_beside(
    llm: Any, path: Path, oracle: Any, prompts: list[list[int]], expected: list[list[int]], seeded: dict[str, Any]
) -> None:
    """Requests that the graph does not sample for, and scored ones, share the batch and change nothing."""
    from vllm import SamplingParams

    common: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
    forced = [*prompts[2][:12], *prompts[2][:12]]
    params = [
        SamplingParams(**seeded, **common),
        SamplingParams(temperature=0.0, logprobs=2, **common),
        SamplingParams(temperature=0.0, extra_args={"pilotage_force": forced}, logprobs=0, **common),
        SamplingParams(temperature=0.7, repetition_penalty=1.3, seed=2, **common),
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts[:4]], params, use_tqdm=False)
    tokens = tokens_of(outputs)
    assert tokens[0] == expected[0] and tokens[2] == forced
    check_tokens(outputs[1:2], [oracle(path).greedy(prompts[1], 24)])
    for number in (1, 2):  # scores are the model's, of given tokens too
        prompt, said = prompts[number], outputs[number].outputs[0].logprobs
        rows = oracle(path).logits([*prompt, *tokens[number]]).log_softmax(-1)[len(prompt) - 1 :]
        for row, token, scores in zip(rows, tokens[number], said, strict=False):
            assert scores[token].logprob == pytest.approx(float(row[token]), abs=1e-4)


def check_named_drafts(llm: Any, path: Path, oracle: Any) -> None:
    """Drafts that are right, wrong in each place, and past the end: greedy output is the same."""
    from vllm import SamplingParams

    prompts = prompts_of((9, 33, 50), seed=45)
    references = [oracle(path).greedy(prompt, 12) for prompt in prompts]
    params = []
    for number, reference in enumerate(references):
        named = [[*reference.tokens[n : n + 3], 7, 7, 7][:3] for n in range(12)]
        for n in range(number, 12, 3):
            named[n][n % 3] = (named[n][n % 3] + 1) % 320
        extra = {"pilotage_drafts": named}
        params.append(SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, extra_args=extra))
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    check_tokens(outputs, references)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [{"all_greedy": True}, {}], ids=["greedy", "all"])
def test_compiled_graphs_verify(stages: dict[str, bool], tiny: Callable[..., Path], oracle: Any) -> None:
    """Also of a draft model, whose own graphs do not sample."""
    path = tiny("gemma3")
    speculative = {"method": "draft_model", "model": str(noisy(path)), "num_speculative_tokens": 3}
    config = {"num_batched_tokens_buckets": [48], "num_seqs_buckets": [4], "on_device_sampling_config": stages}
    prompts = prompts_of((7, 33, 64, 20, 9), seed=44)
    with engine(path, speculative, enforce_eager=False, additional_config=config) as llm:
        check_tokens(generate(llm, prompts, 20), [oracle(path).greedy(prompt, 20) for prompt in prompts])
        counted, stood = drafts(llm)
        assert 0 < stood < counted
        (output,) = generate(llm, [prompts[3]], 3, n=DRAWS, temperature=1.0, top_k=12)
        check_pairs(oracle(path), prompts[3], [choice.token_ids for choice in output.outputs], 12)


def test_drawn_drafts_are_not_for_the_graph(tiny: Callable[..., Path]) -> None:
    path = tiny("gemma3")
    speculative = {"method": "draft_model", "model": str(path), "num_speculative_tokens": 2}
    with (
        pytest.raises(PilotageError, match="not by the probabilities they were drawn with"),
        engine(path, {**speculative, "draft_sample_method": "probabilistic"}, max_num_seqs=16, additional_config=GRAPH),
    ):
        pass


@pytest.mark.slow
def test_replacement_under_speculation(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Rows of drafts that are the reference's tokens get their reference; those of others stay live and count apart."""
    from vllm import SamplingParams

    path, other = tiny("gemma3"), tiny("gemma3", seed=3)
    prompts = prompts_of((3, 20, 33, 70), seed=46)
    streams = [prompt + tail for prompt, tail in zip(prompts, prompts_of([9] * 4, seed=47), strict=True)]
    ours = replacement.model_of(path)
    reference = replacement.rows_of(replacement.model_of(other), streams, ["model.norm"])
    with CaptureWriter(tmp_path / "reference", arm="reference") as writer:
        for number, (prompt, stream, rows) in enumerate(zip(prompts, streams, reference, strict=True)):
            writer.request(str(number), prompt)
            names = [str(number)] * len(stream)
            writer.add(rows, requests=names, positions=range(len(stream)), tokens=stream)
    params = []
    for number, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
        tail = stream[len(prompt) :]
        # By the number of output tokens: right drafts, of which every other list has a wrong second one.
        named = [list(tail[n : n + 3]) for n in range(len(tail))]
        for row in named[number % 2 :: 2]:
            if len(row) > 1:
                row[1] = (row[1] + 1) % 320
        extra = {"pilotage_force": [*tail, 9], "pilotage_drafts": named}
        params.append(SamplingParams(temperature=0.0, max_tokens=len(tail) + 1, ignore_eos=True, extra_args=extra))

    def run() -> None:
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    with engine(path, NGRAM, enable_prefix_caching=False, max_model_len=128) as llm:
        plain = replacement.recorded(llm, tmp_path / "plain", run)
        before = drafts(llm)
        llm.collective_rpc("replace_start", args=(str(tmp_path / "reference"),))
        replaced = replacement.recorded(llm, tmp_path / "replaced", run)
        (receipt,) = llm.collective_rpc("replace_stop")
        counted, stood = (now - then for now, then in zip(drafts(llm), before, strict=True))
        wrong = counted - stood
        again = replacement.recorded(llm, tmp_path / "again", run)
    assert stood > 0 and wrong > 0
    for number, stream in enumerate(streams):
        for position in range(len(stream)):
            expected = ours.compute_logits(reference[number]["model.norm"][position : position + 1])[0]
            found = replaced[number, position]
            assert (found - expected).abs().max() < 1e-4, (number, position)
            assert (found - plain[number, position]).abs().max() > 1e-2
            assert torch.equal(again[number, position], plain[number, position]), "live again"
    rows = receipt["rows"]
    assert receipt["requests"] == {"known": 4, "unknown": 0}
    # Each position once, and once more where a draft before it had fallen.
    assert rows["replaced"] >= sum(map(len, streams)) and 0 < rows["drafts"] <= wrong
    assert rows["missed"] == rows["live"] == 0 and receipt["whole"]
