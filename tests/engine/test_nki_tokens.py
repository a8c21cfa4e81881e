"""Tiny models served with our NKI kernels in the interpreter give Hugging Face's tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import check_tokens, generate, prompts_of

import pilotage.functional as NF
from pilotage.serving import launch

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CONFIG = {"num_batched_tokens_buckets": [64], "num_seqs_buckets": [4]}
LENGTHS = (1, 17, 24)  # windows are 16
TOKENS = 4


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_tokens_with_nki_kernels(
    name: str, tiny: Callable[..., Path], oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NKI_SIMULATOR", "1")
    path = tiny(name)
    prompts = prompts_of(LENGTHS, seed=5)
    with launch.engine(
        path, dtype="float32", enforce_eager=True, max_model_len=48, max_num_seqs=4,
        block_size=16, additional_config=CONFIG,
    ) as llm:  # fmt: skip
        NF.reset_receipt()
        outputs = generate(llm, prompts, TOKENS)
        ran = {operator: {one["implementation"] for one in rows} for operator, rows in NF.receipt().items()}
    check_tokens(outputs, [oracle(path).greedy(prompt, TOKENS) for prompt in prompts])
    for operator in (
        "rms_norm",
        "rotary",
        "qkv_proj",
        "o_proj",
        "mlp",
        "write_kv",
        "segmented_attention",
        "attention_decode",
    ):
        assert ran.get(operator) == {"nki"}, (operator, ran)
