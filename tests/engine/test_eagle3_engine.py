"""An EAGLE3 head in the running engine: tokens as without it, whether it is right or wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import eagle3_heads as heads
import pytest
import torch
from conftest import check_tokens, generate, prompts_of, tokens_of
from test_speculation import DRAWS, WIDE, check_pairs, drafts, engine

from pilotage.core.errors import PilotageError

pytestmark = pytest.mark.engine

PROMPTS = prompts_of((1, 7, 33, 100, 48, 64, 20), seed=41)
KNOWN = PROMPTS[1:4]


def fitted(path: Path, oracle: Any) -> Path:
    """A head that is fitted to what the model says after some of the prompts, so that it is right there at times."""
    directory = path.with_name(f"{path.name}-eagle3")
    if not directory.exists():
        texts, states = [], []
        for prompt in KNOWN:
            text = [*prompt, *oracle(path).greedy(prompt, 30).tokens]
            with torch.no_grad():
                found = oracle(path).model(torch.tensor([text]), output_hidden_states=True).hidden_states
            texts.append(text)
            states.append(torch.cat([found[layer][0] for layer in heads.AUX], dim=-1))
        heads.fitted(directory, path, texts, [len(prompt) for prompt in KNOWN], states)
    return directory


def eagle(path: Path, oracle: Any, **more: Any) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(fitted(path, oracle)), "num_speculative_tokens": 3, **more}


@pytest.fixture(scope="module")
def served(tiny: Callable[..., Path], oracle: Any) -> Iterator[tuple[Path, Any]]:
    path = tiny("llama3")
    with engine(path, eagle(path, oracle), **WIDE) as llm:
        yield path, llm


def test_greedy_tokens_are_those_without_drafts(served: tuple[Path, Any], oracle: Any) -> None:
    path, llm = served
    references = [oracle(path).greedy(prompt, 30) for prompt in PROMPTS]
    check_tokens(generate(llm, PROMPTS, 30), references)
    counted, stood = drafts(llm)
    assert 0 < stood < counted, (stood, counted)
    again = generate(llm, PROMPTS, 30)  # behind prefix hits, whose hidden states nobody computes again
    assert again[3].num_cached_tokens > 0
    check_tokens(again, references)
    assert drafts(llm)[1] > stood
    # To the last token that the engine can hold.
    check_tokens(generate(llm, PROMPTS[3:4], 60), [oracle(path).greedy(PROMPTS[3], 60)])


@pytest.mark.slow
def test_samples_are_distributed_as_without(served: tuple[Path, Any], oracle: Any) -> None:
    path, llm = served
    before = drafts(llm)
    prompt = KNOWN[1]  # where the head is right at times
    (output,) = generate(llm, [prompt], 3, n=DRAWS, temperature=1.0, top_k=12)
    check_pairs(oracle(path), prompt, [choice.token_ids for choice in output.outputs], 12)
    counted, stood = (after - b for after, b in zip(drafts(llm), before, strict=True))
    assert 0 < stood < counted


def test_the_head_reads_the_right_states_at_the_right_positions(tiny: Callable[..., Path], oracle: Any) -> None:
    """It was fitted outside of the engine: one state, token or position off, and it would be no better than chance."""
    path = tiny("llama3")
    with engine(path, eagle(path, oracle), enable_prefix_caching=False) as llm:
        check_tokens(generate(llm, KNOWN, 30), [oracle(path).greedy(prompt, 30) for prompt in KNOWN])
        counted, stood = drafts(llm)
        print(f"{stood} of {counted} drafts stood")
        assert stood > 0.3 * counted, (stood, counted)


@pytest.mark.slow
def test_preemption(tiny: Callable[..., Path], oracle: Any) -> None:
    path = tiny("qwen3")
    prompts = [*prompts_of((50, 41, 46), seed=25), KNOWN[1]]
    settings = {"block_size": 16, "num_gpu_blocks_override": 14, "enable_prefix_caching": False}
    with engine(path, eagle(path, oracle), **settings) as llm:
        outputs = generate(llm, prompts, 40)
        counted = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
        assert counted["vllm:num_preemptions"] > 0 and drafts(llm)[1] > 0
    check_tokens(outputs, [oracle(path).greedy(prompt, 40) for prompt in prompts])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_two_ranks(method: str, tiny: Callable[..., Path], oracle: Any) -> None:
    path = tiny("llama3")
    with engine(path, eagle(path, oracle, draft_sample_method=method), tensor_parallel_size=2) as llm:
        outputs = generate(llm, PROMPTS, 24)
        counted, stood = drafts(llm)
        assert 0 < stood < counted
        sampled = tokens_of(generate(llm, PROMPTS, 24, temperature=0.8))
        assert all(len(tokens) == 24 for tokens in sampled)
    check_tokens(outputs, [oracle(path).greedy(prompt, 24) for prompt in PROMPTS])


@pytest.mark.slow
def test_compiled(tiny: Callable[..., Path], oracle: Any) -> None:
    path = tiny("qwen3")
    one = {"num_batched_tokens_buckets": [48], "num_seqs_buckets": [4]}
    with engine(path, eagle(path, oracle), enforce_eager=False, additional_config=one) as llm:
        outputs = generate(llm, PROMPTS, 24)
        counted, stood = drafts(llm)
        assert 0 < stood < counted
    check_tokens(outputs, [oracle(path).greedy(prompt, 24) for prompt in PROMPTS])


def test_a_target_that_takes_no_head_says_why(tiny: Callable[..., Path], oracle: Any, tmp_path: Path) -> None:
    path = tiny("gemma3")
    hidden = json.loads((path / "config.json").read_text())["hidden_size"]
    head = heads.write(tmp_path / "head", path, heads.random_tensors(hidden, 320, 50))
    speculative = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}
    with pytest.raises(PilotageError, match=r"Gemma3.* does not hand out the hidden states"), engine(path, speculative):
        pass
