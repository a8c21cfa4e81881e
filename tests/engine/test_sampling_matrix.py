"""Every sampling parameter does what it says, sampled by vLLM's sampler on the CPU or inside the graph.

Distributions are held against Hugging Face's logits: a parameter that is not obeyed shows as a token that must not
come, or in the chi-square statistic.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_tokens, generate, prompts_of, tokens_of

from pilotage.serving import launch

pytestmark = pytest.mark.engine

CONFIG = {"num_batched_tokens_buckets": [16, 64], "num_seqs_buckets": [4, 16, 64]}
DRAWS = 400


@pytest.fixture(scope="module", params=["host", "graph"])
def served(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> Iterator[tuple[Path, Any]]:
    path = tiny("gemma3")
    config = CONFIG if request.param == "host" else {**CONFIG, "on_device_sampling_config": {}}
    with launch.engine(
        path,
        dtype="float32",
        enforce_eager=True,
        max_model_len=160,
        max_num_seqs=64,
        max_logprobs=330,
        additional_config=config,
        async_scheduling=True,
        enable_prompt_embeds=True,
        # A random model would fill its JSON with blanks until the tokens run out.
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
    ) as llm:
        operators = llm.collective_rpc("receipt")[0]["operators"]
        assert "sample_tokens" not in operators
        generate(llm, [[1, 2]], 1)
        operators = llm.collective_rpc("receipt")[0]["operators"]
        assert ("sample_tokens" in operators) == (request.param == "graph")
        yield path, llm


def draws(llm: Any, prompt: list[int], **sampling: Any) -> torch.Tensor:
    """Sample the token after a prompt many times; returns how often each came, [V]."""
    (output,) = generate(llm, [prompt], 1, n=DRAWS, **sampling)
    tokens = torch.tensor([choice.token_ids[0] for choice in output.outputs])
    assert len(tokens) == DRAWS
    return tokens.bincount(minlength=320)


def check_distribution(counts: torch.Tensor, expected: torch.Tensor) -> None:
    """Chi-square at about 5 sigma; cells with few expected draws are joined."""
    assert counts[expected == 0].sum() == 0, "a token came that must not"
    big = DRAWS * expected >= 5
    observed, mean = counts[big].double(), DRAWS * expected[big].double()
    rest = DRAWS * float(expected[~big].sum())
    if rest >= 5:
        observed = torch.cat((observed, counts[~big].sum().double()[None]))
        mean = torch.cat((mean, torch.tensor([rest], dtype=torch.float64)))
    assert len(mean) > 1, "nothing to tell apart"
    statistic, freedom = float(((observed - mean) ** 2 / mean).sum()), len(mean) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 3, (statistic, freedom)


def nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    order = probabilities.argsort(descending=True)
    before = probabilities[order].cumsum(0) - probabilities[order]
    kept = torch.zeros_like(probabilities)
    kept[order[before < top_p]] = probabilities[order[before < top_p]]
    return kept / kept.sum()


CASES: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "temperature": ({"temperature": 1.0}, lambda x: x.softmax(-1)),
    "colder": ({"temperature": 0.6}, lambda x: (x / 0.6).softmax(-1)),
    "top_k": ({"temperature": 1.2, "top_k": 7}, lambda x: _top(x / 1.2, 7).softmax(-1)),
    "top_p": ({"temperature": 1.0, "top_p": 0.7}, lambda x: nucleus(x.softmax(-1), 0.7)),
    "top_k and top_p": (
        {"temperature": 0.9, "top_k": 12, "top_p": 0.8},
        lambda x: nucleus(_top(x / 0.9, 12).softmax(-1), 0.8),
    ),
    "min_p": ({"temperature": 1.0, "min_p": 0.3}, lambda x: _normal(_at_least(x.softmax(-1), 0.3))),
    "allowed_token_ids": (
        {"temperature": 1.0, "allowed_token_ids": [7, 80, 200]},
        lambda x: _normal(_only(x.softmax(-1), [7, 80, 200])),
    ),
}


def _top(logits: torch.Tensor, count: int) -> torch.Tensor:
    return logits.masked_fill(logits < logits.topk(count).values[-1], float("-inf"))


def _at_least(probabilities: torch.Tensor, share: float) -> torch.Tensor:
    return torch.where(probabilities >= share * probabilities.max(), probabilities, 0.0)


def _only(probabilities: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    kept = torch.zeros_like(probabilities)
    kept[tokens] = probabilities[tokens]
    return kept


def _normal(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum()


@pytest.mark.parametrize("case", CASES)
def test_distributions(served: tuple[Path, Any], oracle: Any, case: str) -> None:
    path, llm = served
    (prompt,) = prompts_of((37,), seed=31)
    sampling, expected = CASES[case]
    logits = oracle(path).logits(prompt)[-1]
    check_distribution(draws(llm, prompt, **sampling), expected(logits))


def test_logit_bias_is_added(served: tuple[Path, Any], oracle: Any) -> None:
    path, llm = served
    (prompt,) = prompts_of((20,), seed=32)
    logits = oracle(path).logits(prompt)[-1]
    first, second = logits.topk(2).indices.tolist()
    bias = {first: -3.0, second: 1.5}
    for token, value in bias.items():
        logits[token] += value
    check_distribution(draws(llm, prompt, temperature=1.0, logit_bias=bias), logits.softmax(-1))


def test_penalties_change_the_logits_as_documented(served: tuple[Path, Any], oracle: Any) -> None:
    path, llm = served
    (prompt,) = prompts_of((12,), seed=33)
    sampling = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4}
    tokens = list(prompt)
    for _ in range(16):
        logits = oracle(path).logits(tokens)[-1].clone()
        seen = torch.tensor(tokens).unique()
        factor = torch.where(logits[seen] > 0, 1 / 1.3, 1.3)
        logits[seen] *= factor
        said = torch.tensor(tokens[len(prompt) :], dtype=torch.int64).bincount(minlength=len(logits))
        logits -= 0.4 * said + 0.7 * (said > 0)
        tokens.append(int(logits.argmax()))
    assert tokens_of(generate(llm, [prompt], 16, **sampling)) == [tokens[len(prompt) :]]


def test_bad_words_and_minimum_lengths(served: tuple[Path, Any], oracle: Any) -> None:
    path, llm = served
    (prompt,) = prompts_of((9,), seed=34)
    free = oracle(path).greedy(prompt, 12).tokens
    (tokens,) = tokens_of(generate(llm, [prompt], 12, stop_token_ids=[free[1]], min_tokens=6))
    assert tokens[:1] == free[:1] and free[1] not in tokens[:6] and len(tokens) >= 6
    word = llm.get_tokenizer().decode([free[0]])
    (tokens,) = tokens_of(generate(llm, [prompt], 4, bad_words=[word]))
    assert tokens[0] != free[0]


def test_seeds_and_several_choices(served: tuple[Path, Any]) -> None:
    _, llm = served
    prompts = prompts_of((9, 60, 100, 20), seed=35)
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 5, "top_p": 0.95, "top_k": 50}
    together = tokens_of(generate(llm, prompts, 16, **sampling))
    alone = [tokens_of(generate(llm, [prompt], 16, **sampling))[0] for prompt in prompts]
    scored = tokens_of(generate(llm, prompts, 16, **sampling, logprobs=2))
    assert together == alone == scored
    (output,) = generate(llm, prompts[:1], 16, **sampling, n=3)
    choices = [tuple(choice.token_ids) for choice in output.outputs]
    assert len(set(choices)) == 3
    (again,) = generate(llm, prompts[:1], 16, **sampling, n=3)
    assert choices == [tuple(choice.token_ids) for choice in again.outputs]


def test_each_request_of_a_batch_has_its_own_parameters(served: tuple[Path, Any], oracle: Any) -> None:
    """Greedy, scored, penalised, seeded and constrained requests side by side leave each other alone."""
    from vllm import SamplingParams

    path, llm = served
    prompts = prompts_of((11, 30, 50, 21, 8), seed=36)
    common: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0.0, **common),
        SamplingParams(temperature=0.0, logprobs=3, **common),
        SamplingParams(temperature=0.8, seed=3, top_k=40, **common),
        SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.2, **common),
        SamplingParams(temperature=0.0, allowed_token_ids=[17, 18], **common),
    ]
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    together = llm.generate(requests, params, use_tqdm=False)
    alone = [llm.generate([r], [p], use_tqdm=False)[0] for r, p in zip(requests, params, strict=True)]
    assert tokens_of(together) == tokens_of(alone)
    check_tokens(together[:2], [oracle(path).greedy(prompt, 12) for prompt in prompts[:2]])
    rows = oracle(path).greedy(prompts[1], 12).logits[len(prompts[1]) - 1 :].log_softmax(-1)
    for row, said, token in zip(rows, together[1].outputs[0].logprobs, tokens_of(together)[1], strict=True):
        assert said[token].rank == 1 and abs(said[token].logprob - float(row[token])) < 1e-4
    assert set(tokens_of(together)[4]) <= {17, 18}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_structured_output(served: tuple[Path, Any], temperature: float) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    _, llm = served
    tokenizer = llm.get_tokenizer()
    schema = {
        "type": "object",
        "properties": {"wind": {"enum": ["north", "west"]}, "calm": {"type": "boolean"}},
        "required": ["wind", "calm"],
        "additionalProperties": False,
    }
    wanted: dict[str, Any] = {
        "json": StructuredOutputsParams(json=schema),
        "regex": StructuredOutputsParams(regex="[ab]{3}(-[0-9]{2}){2}"),
        "choice": StructuredOutputsParams(choice=["north", "south-west"]),
    }
    said = {}
    for kind, constraint in wanted.items():
        outputs = generate(
            llm,
            prompts_of((10, 50), seed=37),
            80,
            ignore_eos=False,
            temperature=temperature,
            structured_outputs=constraint,
        )
        said[kind] = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in tokens_of(outputs)]
    for text in said["json"]:
        found = json.loads(text)
        assert found["wind"] in ("north", "west") and isinstance(found["calm"], bool) and len(found) == 2
    assert all(re.fullmatch("[ab]{3}(-[0-9]{2}){2}", text) for text in said["regex"]), said["regex"]
    assert set(said["choice"]) <= {"north", "south-west"}


def test_stop_strings(served: tuple[Path, Any]) -> None:
    _, llm = served
    (prompt,) = prompts_of((14,), seed=38)
    (free,) = generate(llm, [prompt], 30)
    text = free.outputs[0].text
    middle = len(text) // 2
    stop = text[middle : middle + 3]
    (cut,) = generate(llm, [prompt], 30, stop=[stop])
    assert cut.outputs[0].finish_reason == "stop" and cut.outputs[0].stop_reason == stop
    assert cut.outputs[0].text == text[: text.index(stop)]
    (kept,) = generate(llm, [prompt], 30, stop=[stop], include_stop_str_in_output=True)
    assert kept.outputs[0].text == text[: text.index(stop) + len(stop)]


def test_prompt_embeds_are_the_prompt(served: tuple[Path, Any], oracle: Any) -> None:
    """Rows from the model's own embedding give the tokens of the ids they came from, beside requests of ids."""
    from vllm import SamplingParams

    path, llm = served
    model = oracle(path).model
    prompts = prompts_of((5, 33, 90, 20), seed=39)
    with torch.no_grad():
        rows = [model.get_input_embeddings()(torch.tensor(prompt)) for prompt in prompts]
    requests = [{"prompt_embeds": rows[0]}, {"prompt_embeds": rows[1]}, {"prompt_embeds": rows[2]}]
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    outputs = llm.generate([*requests, {"prompt_token_ids": prompts[3]}], params, use_tqdm=False)
    check_tokens(outputs, [oracle(path).greedy(prompt, 10) for prompt in prompts])
    # Rows that no token has: reversed in sign, the continuation is another one.
    (turned,) = llm.generate([{"prompt_embeds": -rows[1]}], params, use_tqdm=False)
    assert tokens_of([turned]) != tokens_of(outputs[1:2])


@pytest.mark.slow
@pytest.mark.parametrize("stages", [{}, {"all_greedy": True}, {"temperature": True, "top_k": False, "top_p": False}])
def test_compiled_graphs_sample(stages: dict[str, bool], tiny: Callable[..., Path], oracle: Any) -> None:
    """In compiled graphs, with asynchronous scheduling and without: the same tokens, distributed as they should be."""
    path = tiny("llama3")
    prompts = prompts_of((5, 30, 50, 90), seed=41)
    sampling: dict[str, Any] = {"temperature": 0.9, "seed": 8}
    found = []
    for asynchronous in (True, False):
        with launch.engine(
            path,
            dtype="float32",
            max_model_len=128,
            max_num_seqs=4,
            additional_config={
                "num_batched_tokens_buckets": [64],
                "num_seqs_buckets": [4],
                "on_device_sampling_config": stages,
            },
            async_scheduling=asynchronous,
        ) as llm:
            check_tokens(generate(llm, prompts, 20), [oracle(path).greedy(prompt, 20) for prompt in prompts])
            found.append(tokens_of(generate(llm, prompts, 20, **sampling)))
            logits = oracle(path).logits(prompts[0])[-1]
            check_distribution(draws(llm, prompts[0], temperature=1.0), logits.softmax(-1))
            check_distribution(draws(llm, prompts[0], temperature=1.0, top_k=6), _top(logits, 6).softmax(-1))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_sample_alike(tiny: Callable[..., Path], oracle: Any) -> None:
    path = tiny("llama3")
    prompts = prompts_of((5, 30, 50, 90), seed=42)
    options: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 128, "max_num_seqs": 4}
    config = {"num_batched_tokens_buckets": [64], "num_seqs_buckets": [4], "on_device_sampling_config": {}}
    found = []
    for ranks in (1, 2):
        with launch.engine(path, **options, additional_config=config, tensor_parallel_size=ranks) as llm:
            check_tokens(generate(llm, prompts, 12), [oracle(path).greedy(prompt, 12) for prompt in prompts])
            found.append(tokens_of(generate(llm, prompts, 12, temperature=1.0, seed=4)))
    assert found[0] == found[1]


def test_a_forbidden_phrase_of_several_tokens(served: tuple[Path, Any]) -> None:
    """Its last token is barred where the others stand before it, at every step, and nowhere else."""
    _, llm = served
    tokenizer = llm.get_tokenizer()
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "bcdfgjkqvwxz"]
    (prompt,) = prompts_of((9,), seed=37)
    sampling: dict[str, Any] = {"allowed_token_ids": letters}
    (free,) = tokens_of(generate(llm, [prompt], 24, **sampling))
    for first in (0, 1, 7):
        phrase = tokenizer.decode(free[first : first + 3])
        assert tokenizer.encode(phrase, add_special_tokens=False) == free[first : first + 3]
        (tokens,) = tokens_of(generate(llm, [prompt], 24, **sampling, bad_words=[phrase]))
        triples = [tokens[at : at + 3] for at in range(22)]
        assert free[first : first + 3] not in triples and tokens[: first + 2][:2] == free[:2]
