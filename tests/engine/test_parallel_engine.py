"""Expert parallelism, replicas of components and replicas of the engine: tokens equal Hugging Face's."""

from __future__ import annotations

import concurrent.futures
import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import check_tokens, disagreement, generate, prompts_of

from pilotage.core.errors import ConfigError, PilotageError
from pilotage.serving import launch

pytestmark = pytest.mark.engine

CONFIG = {"num_batched_tokens_buckets": [16, 64], "num_seqs_buckets": [1, 4]}
HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def start(path: Path, **options: Any) -> None:
    with launch.engine(path, dtype="float32", enforce_eager=True, max_model_len=64, **options):
        raise AssertionError("the engine started")


def test_sizes_that_do_not_fit_are_refused_with_the_ones_that_do(tiny: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"ep_degree=2 without expert parallelism.*enable_expert_parallel=True"):
        start(tiny("qwen3_moe"), additional_config={"ep_degree": 2})
    with pytest.raises(ConfigError, match=r"mlp_dp_size=3 does not divide tensor_parallel_size=2; use 1 or 2"):
        start(tiny("qwen3_moe"), tensor_parallel_size=2, additional_config={"mlp_dp_size": 3})
    with pytest.raises(ConfigError, match=r"attention_dp_size=0 is not a positive integer"):
        start(tiny("qwen3_moe"), additional_config={"attention_dp_size": 0})


@pytest.mark.slow
@pytest.mark.distributed
def test_experts_that_do_not_divide_are_refused_at_start(tiny: Callable[..., Path]) -> None:
    with pytest.raises(PilotageError, match=r"layers\.0\.mlp: 5 experts do not divide over ep_degree=2; use 1 or 5"):
        start(tiny("mixtral"), tensor_parallel_size=2, enable_expert_parallel=True)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "ranks", "config"),
    [
        ("deepseek_v3", 2, {}),
        ("qwen3_moe", 4, {"ep_degree": 2, "attention_dp_size": 2, "lm_head_dp_size": 2}),
        ("qwen3", 2, {"attention_dp_size": 2, "mlp_dp_size": 2, "embedding_dp_size": 2, "lm_head_dp_size": 2}),
    ],
)
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_tokens_equal_hf(
    name: str, ranks: int, config: dict[str, int], eager: bool, tiny: Callable[..., Path], oracle: Any
) -> None:
    path = tiny(name, num_attention_heads=8) if ranks == 4 else tiny(name)
    prompts = prompts_of((3, 33, 64, 90), seed=5)
    with launch.engine(
        path,
        dtype="float32",
        enforce_eager=eager,
        max_model_len=160,
        max_num_seqs=4,
        tensor_parallel_size=ranks,
        enable_expert_parallel=name != "qwen3",
        additional_config=CONFIG | config,
    ) as llm:
        outputs = generate(llm, prompts, 16)
    check_tokens(outputs, [oracle(path).greedy(prompt, 16) for prompt in prompts])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_two_replicas_of_the_engine_serve_at_once(name: str, tiny: Callable[..., Path], oracle: Any) -> None:
    """Of experts vLLM steps the replicas together, also one without work."""
    path = tiny(name)
    prompts = prompts_of((3, 17, 40, 64, 90, 21), seed=6)
    with launch.server(
        path,
        dtype="float32",
        enforce_eager=True,
        max_model_len=160,
        max_num_seqs=4,
        arguments=["--data-parallel-size", "2"],
    ) as server:

        def ask(prompt: list[int]) -> list[int]:
            body = {"model": server.model, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            request = urllib.request.Request(
                f"{server.url}/v1/completions",
                data=json.dumps({**body, "return_token_ids": True}).encode(),
                headers={"Content-Type": "application/json"},
            )
            with HTTP.open(request, timeout=120) as answer:
                return list(json.loads(answer.read())["choices"][0]["token_ids"])

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            found = list(pool.map(ask, prompts))
        alone = ask(prompts[0])
    for prompt, tokens in zip([*prompts, prompts[0]], [*found, alone], strict=True):
        assert not disagreement(tokens, oracle(path).greedy(prompt, 12))
