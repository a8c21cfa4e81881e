"""Speculation in the running engine: tokens as without it, whatever is drafted, accepted or rejected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_tokens, generate, prompts_of, tokens_of

from pilotage.serving import launch

pytestmark = pytest.mark.engine

CONFIG = {"num_batched_tokens_buckets": [16, 48], "num_seqs_buckets": [1, 4]}
# Distributions take many requests: sixteen at a time.
WIDE: dict[str, Any] = {
    "max_num_seqs": 16,
    "additional_config": {"num_batched_tokens_buckets": [16, 64], "num_seqs_buckets": [1, 4, 16]},
}
DRAWS = 600
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def engine(path: Path, speculative: dict[str, Any], **settings: Any) -> Any:
    arguments = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 160,
        "max_num_seqs": 4,
        "additional_config": CONFIG,
        "disable_log_stats": False,
        **settings,
    }
    return launch.engine(path, speculative_config=speculative, **arguments)


def drafts(llm: Any) -> tuple[int, int]:
    """Return how many tokens were drafted, and how many of them stood, since the engine started."""
    counted = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return counted["vllm:spec_decode_num_draft_tokens"], counted["vllm:spec_decode_num_accepted_tokens"]


def repeating(seed: int) -> list[list[int]]:
    """Prompts that say things twice, longer than the window, of unequal lengths."""
    return [[*part, 9, *part, *part[: 3 + n]] for n, part in enumerate(prompts_of((30, 4, 17, 44, 9, 21), seed=seed))]


@pytest.fixture(scope="module")
def served(tiny: Callable[..., Path]) -> Iterator[tuple[Path, Any]]:
    path = tiny("gemma3")
    with engine(path, NGRAM, **WIDE) as llm:
        yield path, llm


def test_greedy_tokens_are_those_without_drafts(served: tuple[Path, Any], oracle: Any) -> None:
    path, llm = served
    prompts = repeating(seed=21)
    outputs = generate(llm, prompts, 24)
    check_tokens(outputs, [oracle(path).greedy(prompt, 24) for prompt in prompts])
    drafted, stood = drafts(llm)
    assert 0 < stood < drafted  # both ways of ending a draft were taken
    # A prefix hit that leaves a single token enters the batch with padded drafts.
    again = generate(llm, [prompts[0], prompts[0][:33]], 8)
    assert again[0].num_cached_tokens > 0
    check_tokens(again, [oracle(path).greedy(prompt, 8) for prompt in (prompts[0], prompts[0][:33])])


def test_captured_rows_under_speculation(served: tuple[Path, Any], tmp_path: Path) -> None:
    """Every computed position of a request has the row of its own token; drafts that fell have none."""
    from test_capture import check

    from pilotage.probe import Captures

    path, llm = served
    prompts = [[7, *prompt] for prompt in repeating(seed=28)]  # nothing in the prefix cache
    before = drafts(llm)
    llm.collective_rpc("capture_start", args=(str(tmp_path), ["model.layers.*", "model.layers.1.self_attn.q_rope"]))
    outputs = generate(llm, prompts, 24)
    llm.collective_rpc("capture_stop")
    counted, stood = (after - b for after, b in zip(drafts(llm), before, strict=True))
    assert 0 < stood < counted
    cached = [output.num_cached_tokens for output in outputs]
    check(Captures.open(tmp_path), path, prompts, tokens_of(outputs), cached)


def test_logprobs_and_stops_at_accepted_tokens(served: tuple[Path, Any], oracle: Any) -> None:
    path, llm = served
    (prompt,) = repeating(seed=22)[:1]
    reference = oracle(path).greedy(prompt, 20)
    (output,) = generate(llm, [prompt], 20, logprobs=2)
    assert list(output.outputs[0].token_ids) == reference.tokens
    rows = torch.log_softmax(reference.logits[len(prompt) - 1 :], -1)
    for row, token, said in zip(rows, reference.tokens, output.outputs[0].logprobs, strict=True):
        assert said[token].logprob == pytest.approx(float(row[token]), abs=1e-4)
    # The n-th token, whichever draft brought it, ends the request when it is a stop token.
    stop = reference.tokens[12]
    (output,) = generate(llm, [prompt], 20, stop_token_ids=[stop])
    assert list(output.outputs[0].token_ids) == reference.tokens[: reference.tokens.index(stop) + 1]


def test_forced_tokens_are_forced_through_drafts(served: tuple[Path, Any]) -> None:
    _, llm = served
    before = drafts(llm)[1]
    prompts = repeating(seed=23)[:3]
    forced = [[*prompt[:12], *prompt[:8]] for prompt in prompts]
    from vllm import SamplingParams

    params = [
        SamplingParams(max_tokens=20, temperature=t, ignore_eos=True, extra_args={"pilotage_force": tokens})
        for t, tokens in zip((0.0, 1.0, 0.0), forced, strict=True)
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert tokens_of(outputs) == forced
    assert drafts(llm)[1] > before


def test_seeded_samples_repeat_and_do_not_depend_on_the_batch(served: tuple[Path, Any]) -> None:
    _, llm = served
    prompts = repeating(seed=24)
    sampling: dict[str, Any] = {"temperature": 0.7, "seed": 5, "top_p": 0.95}
    together = tokens_of(generate(llm, prompts, 16, **sampling))
    alone = [tokens_of(generate(llm, [prompt], 16, **sampling))[0] for prompt in prompts[:2]]
    assert together[:2] == alone


def test_samples_with_ngrams_are_distributed_as_without(served: tuple[Path, Any], oracle: Any) -> None:
    path, llm = served
    (part,) = prompts_of((6,), seed=43)
    prompt = part * 5
    before = drafts(llm)
    (output,) = generate(llm, [prompt], 3, n=DRAWS, temperature=1.0, top_k=12)
    check_pairs(oracle(path), prompt, [choice.token_ids for choice in output.outputs], 12)
    assert drafts(llm)[0] > before[0]


def test_preemption_with_drafts(tiny: Callable[..., Path], oracle: Any) -> None:
    path = tiny("llama3")
    prompts = repeating(seed=25)[:4]
    with engine(path, NGRAM, block_size=16, num_gpu_blocks_override=14, enable_prefix_caching=False) as llm:
        outputs = generate(llm, prompts, 40)
        counted = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
        assert counted["vllm:num_preemptions"] > 0 and drafts(llm)[1] > 0
    check_tokens(outputs, [oracle(path).greedy(prompt, 40) for prompt in prompts])


@pytest.mark.distributed
@pytest.mark.slow
def test_two_ranks_agree_on_drafts(tiny: Callable[..., Path], oracle: Any) -> None:
    path = tiny("qwen3")
    prompts = repeating(seed=26)
    with engine(path, NGRAM, tensor_parallel_size=2) as llm:
        outputs = generate(llm, prompts, 24)
        assert drafts(llm)[1] > 0
    check_tokens(outputs, [oracle(path).greedy(prompt, 24) for prompt in prompts])


@pytest.mark.slow
def test_compiled(tiny: Callable[..., Path], oracle: Any) -> None:
    path = tiny("gemma3")
    prompts = repeating(seed=27)
    with engine(path, NGRAM, enforce_eager=False) as llm:
        outputs = generate(llm, prompts, 24)
        assert drafts(llm)[1] > 0
    check_tokens(outputs, [oracle(path).greedy(prompt, 24) for prompt in prompts])


@pytest.fixture(scope="module")
def drafted(tiny: Callable[..., Path]) -> Iterator[tuple[Path, Any]]:
    """A draft model that is the served one with some noise on its weights: often right, often wrong."""
    path = tiny("gemma3")
    speculative = {"method": "draft_model", "model": str(noisy(path)), "num_speculative_tokens": 3}
    with engine(path, speculative, **WIDE) as llm:
        yield path, llm


def noisy(path: Path) -> Path:
    """Copy a checkpoint with noise on its weights."""
    import shutil

    from safetensors.torch import load_file, save_file

    copy = path.with_name(f"{path.name}-noisy")
    if not copy.exists():
        shutil.copytree(path, copy)
        generator = torch.Generator().manual_seed(0)
        for file in copy.glob("*.safetensors"):
            weights = load_file(file)
            for name, weight in weights.items():
                weights[name] = weight + 0.04 * weight.std() * torch.randn(weight.shape, generator=generator)
            save_file(weights, file, metadata={"format": "pt"})
    return copy


def test_a_draft_model_changes_no_token(drafted: tuple[Path, Any], oracle: Any) -> None:
    path, llm = drafted
    prompts = prompts_of((1, 7, 33, 100, 48, 64, 20), seed=41)
    references = [oracle(path).greedy(prompt, 30) for prompt in prompts]
    check_tokens(generate(llm, prompts, 30), references)
    counted, stood = drafts(llm)
    assert 0 < stood < counted, (stood, counted)
    check_tokens(generate(llm, prompts, 30), references)  # from the prefix cache, which holds nothing of the drafts
    # To the last token that the engine can hold.
    check_tokens(generate(llm, prompts[3:4], 60), [oracle(path).greedy(prompts[3], 60)])


def test_samples_of_a_draft_model_are_distributed_as_without(drafted: tuple[Path, Any], oracle: Any) -> None:
    """The second of three tokens is drafted; its distribution, given the first, is the model's own."""
    path, llm = drafted
    (prompt,) = prompts_of((21,), seed=42)
    (output,) = generate(llm, [prompt], 3, n=DRAWS, temperature=1.0, top_k=12)
    check_pairs(oracle(path), prompt, [choice.token_ids for choice in output.outputs], 12)
    counted, stood = drafts(llm)
    assert 0 < stood < counted


def check_pairs(model: Any, prompt: list[int], found: list[Any], top_k: int) -> None:
    """Chi-square of first tokens, and of second and third ones after the tokens that came most often before them."""
    import math
    from collections import Counter

    looked_at = 0
    begun: list[int] = []
    for position in range(3):
        tails = [tokens for tokens in found if list(tokens[:position]) == begun]
        logits = model.logits([*prompt, *begun])[-1]
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
        expected = logits.softmax(-1)
        counts = torch.tensor([tokens[position] for tokens in tails]).bincount(minlength=len(expected))
        assert counts[expected == 0].sum() == 0
        mean = len(tails) * expected
        big = mean >= 5
        cells = [*zip(counts[big].tolist(), mean[big].tolist(), strict=True)]
        if float(mean[~big].sum()) >= 5:
            cells.append((int(counts[~big].sum()), float(mean[~big].sum())))
        if len(cells) > 1:
            statistic, freedom = sum((n - m) ** 2 / m for n, m in cells), len(cells) - 1
            assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 3, (position, statistic, freedom)
            looked_at += 1
        begun.append(Counter(tokens[position] for tokens in tails).most_common(1)[0][0])
    assert looked_at >= 2


@pytest.mark.slow
def test_drawn_drafts_are_verified_by_their_probabilities(tiny: Callable[..., Path], oracle: Any) -> None:
    """Greedy requests as without drafts; sampled ones distributed as without, and accepted more often."""
    path = tiny("gemma3")
    speculative = {"method": "draft_model", "model": str(noisy(path)), "num_speculative_tokens": 3}
    (prompt,) = prompts_of((21,), seed=42)
    shares = {}
    for method in ("greedy", "probabilistic"):
        with engine(path, {**speculative, "draft_sample_method": method}, **WIDE) as llm:
            prompts = prompts_of((7, 33, 64), seed=44)
            check_tokens(generate(llm, prompts, 20), [oracle(path).greedy(prompt, 20) for prompt in prompts])
            before = drafts(llm)
            (output,) = generate(llm, [prompt], 3, n=DRAWS, temperature=1.0, top_k=12)
            check_pairs(oracle(path), prompt, [choice.token_ids for choice in output.outputs], 12)
            counted, stood = (now - then for now, then in zip(drafts(llm), before, strict=True))
            shares[method] = stood / counted
    assert shares["probabilistic"] > shares["greedy"] > 0, shares


def test_ngrams_have_no_probabilities(tiny: Callable[..., Path]) -> None:
    from pilotage.core.errors import PilotageError

    speculative = {**NGRAM, "draft_sample_method": "probabilistic"}
    with (
        pytest.raises(PilotageError, match="n-grams, which have no probabilities"),
        engine(tiny("gemma3"), speculative),
    ):
        pass
