"""Every token of the engine equals Hugging Face's greedy choice, whatever the scheduler does.

The tiny models have windows of 16, so the longest prompts here are past six of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import check_tokens, generate, prompts_of, tokens_of

from pilotage.serving import launch

pytestmark = pytest.mark.engine

LENGTHS = (1, 2, 7, 16, 17, 31, 32, 33, 49, 64, 65, 100)
CONFIG = {"num_batched_tokens_buckets": [16, 64], "num_seqs_buckets": [1, 4]}


# Where their kind of layer is another model's here, with the slow ones: tests/parity has all of them.
MORE = [pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "mistral", "mixtral", "qwen2", "qwen3")]


@pytest.fixture(
    scope="module",
    params=["llama3", "gemma3", "gemma4", "qwen3_moe", "gpt_oss", "deepseek_v3", *MORE],
)
def served(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> Iterator[tuple[Path, Any]]:
    path = tiny(request.param)
    with launch.engine(
        path, dtype="float32", enforce_eager=True, max_model_len=192, max_num_seqs=4, additional_config=CONFIG
    ) as llm:
        yield path, llm


def test_mixed_lengths_chunked_and_from_the_prefix_cache(served: tuple[Path, Any], oracle: Any) -> None:
    path, llm = served
    prompts = prompts_of(LENGTHS, seed=1)
    references = [oracle(path).greedy(prompt, 24) for prompt in prompts]
    cold = generate(llm, prompts, 24)
    check_tokens(cold, references)
    warm = generate(llm, prompts, 24)
    assert sum(output.num_cached_tokens for output in warm) >= 32 * 6
    check_tokens(warm, references)
    # A longer prompt that shares a prefix, so that a chunk starts in the middle of a request.
    longer = [prompt + tail for prompt, tail in zip(prompts[-2:], prompts_of((20, 50), seed=2), strict=True)]
    outputs = generate(llm, longer, 8)
    assert all(output.num_cached_tokens > 0 for output in outputs)
    check_tokens(outputs, [oracle(path).greedy(prompt, 8) for prompt in longer])


def test_requests_that_share_pages_written_in_the_same_step(served: tuple[Path, Any], oracle: Any) -> None:
    """The second request finds the first one's page in the cache before it is computed, and needs one token more."""
    path, llm = served
    (shared,) = prompts_of((33,), seed=3)
    prompts = [shared, shared, [*shared[:32], 7], shared]
    outputs = generate(llm, prompts, 6)
    assert [output.num_cached_tokens for output in outputs] == [0, 32, 32, 32]
    check_tokens(outputs, [oracle(path).greedy(prompt, 6) for prompt in prompts])


def test_a_token_is_told_by_the_step_that_computed_it(tiny: Callable[..., Path]) -> None:
    """Not one step later, which would cost the first token of every request a decoding step of all the others."""
    from vllm import SamplingParams

    with launch.engine(tiny("gemma3"), dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=4) as llm:
        engine = llm.llm_engine
        sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        engine.add_request("0", {"prompt_token_ids": [2, 5, 7, 11]}, sampling)
        told = [[len(output.outputs[0].token_ids) for output in engine.step()] for _ in range(3)]
    assert told == [[1], [2], [3]]


@pytest.mark.parametrize(
    ("name", "async_scheduling"),
    [
        ("gemma3", True),
        ("llama3", False),
        pytest.param("gemma3", False, marks=pytest.mark.slow),
        pytest.param("llama3", True, marks=pytest.mark.slow),
    ],
)
def test_preemption(name: str, async_scheduling: bool, tiny: Callable[..., Path], oracle: Any) -> None:
    path = tiny(name)
    prompts = prompts_of((60, 50, 40, 30, 64, 20), seed=4)
    with launch.engine(
        path,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        additional_config=CONFIG,
        block_size=16,
        # Page 0 is vLLM's own; gemma3 has three groups of layers that share the pool.
        num_gpu_blocks_override=13 if name == "llama3" else 30,
        async_scheduling=async_scheduling,
        disable_log_stats=False,
    ) as llm:
        outputs = generate(llm, prompts, 40)
        counted = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
        assert counted["vllm:num_preemptions"] > 0
        check_tokens(outputs, [oracle(path).greedy(prompt, 40) for prompt in prompts])
        # Seeded sampling must not notice either: the same tokens as alone.
        sampling: dict[str, Any] = {"temperature": 1.0, "seed": 11}
        together = tokens_of(generate(llm, prompts, 40, **sampling))
        alone = [tokens_of(generate(llm, [prompt], 40, **sampling))[0] for prompt in prompts[:3]]
        assert together[:3] == alone


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name",
    [
        "gemma3",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("llama3", "gemma4", "qwen3_moe", "gpt_oss", "deepseek_v3")
        ),
        *MORE,
    ],
)
def test_two_ranks(name: str, tiny: Callable[..., Path], oracle: Any) -> None:
    path = tiny(name)
    prompts = prompts_of((3, 33, 64, 90), seed=5)
    with launch.engine(
        path,
        dtype="float32",
        enforce_eager=True,
        max_model_len=160,
        max_num_seqs=4,
        tensor_parallel_size=2,
        additional_config=CONFIG,
    ) as llm:
        outputs = generate(llm, prompts, 16)
        sampled = generate(llm, prompts, 8, temperature=1.0)
        assert all(len(output.outputs[0].token_ids) == 8 for output in sampled)
    check_tokens(outputs, [oracle(path).greedy(prompt, 16) for prompt in prompts])
