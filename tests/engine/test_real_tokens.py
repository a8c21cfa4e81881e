"""Gemma 3 270M with its real weights, past its window of 512 tokens: every token equals Hugging Face's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import check_tokens, generate, prompts_of

from pilotage.serving import launch

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.real_weights]


@pytest.fixture(scope="module")
def gemma() -> Path:
    from pilotage.arch import source

    return source.resolve("gemma3-270m")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.distributed)])
def test_fp32_tokens(ranks: int, gemma: Path, oracle: Any) -> None:
    from transformers import AutoTokenizer

    text = "The pilot boarded the ship at dawn and studied the chart of the narrow channel. "
    tokenizer = AutoTokenizer.from_pretrained(gemma)
    prose = tokenizer(text * 45)["input_ids"]
    prompts = [prose[:700], prose[:30], prompts_of((540,), seed=6, vocab=200_000)[0], [2, 105, 7]]
    references = [oracle(gemma).greedy(prompt, 24) for prompt in prompts]
    with launch.engine(
        gemma,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=4,
        tensor_parallel_size=ranks,
        additional_config={"num_batched_tokens_buckets": [64, 256]},
    ) as llm:
        check_tokens(generate(llm, prompts, 24), references)
        warm = generate(llm, prompts, 24)
        assert warm[0].num_cached_tokens >= 512
        check_tokens(warm, references)
        # Past the window by decoding, beside prompts that enter the batch meanwhile.
        long = [prose[:490], *prompts[1:]]
        check_tokens(generate(llm, long, 40), [oracle(gemma).greedy(prompt, 40) for prompt in long])


def test_fp32_tokens_after_preemption(gemma: Path, oracle: Any) -> None:
    """Two requests fit until they pass the window; then one is put back and computed again."""
    prompts = prompts_of((500, 498, 30), seed=8, vocab=200_000)
    with launch.engine(
        gemma,
        dtype="float32",
        enforce_eager=True,
        max_model_len=576,
        max_num_seqs=3,
        additional_config={"num_batched_tokens_buckets": [64, 256]},
        block_size=32,
        # 16 pages for each of the six groups of layers while a request has at most 512 tokens, and page 0.
        num_gpu_blocks_override=2 * 6 * 16 + 6 + 1,
        disable_log_stats=False,
    ) as llm:
        outputs = generate(llm, prompts, 40)
        counted = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
        assert counted["vllm:num_preemptions"] > 0
        check_tokens(outputs, [oracle(gemma).greedy(prompt, 40) for prompt in prompts])
