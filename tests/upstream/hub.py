"""A Hugging Face cache in which the names that upstream's tests use are tiny local checkpoints.

The hub's own cache layout does the renaming: with HF_HOME pointing here and HF_HUB_OFFLINE=1 every process that a test
starts, at whatever depth, finds `Qwen/Qwen3-0.6B` without a patch and without a network. Where this target has no such
architecture (OPT, GPT-2) the name stands for "some small causal LM" in those tests, and a tiny Llama takes its place.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from pilotage.arch import tiny
from pilotage.core import store

# Upstream asks for single tokens up to 31,999.
VOCAB_SIZE = 32000
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Name -> (tiny model, configuration fields to replace). Lengths are those of the published model where a test depends
# on them.
_LLAMA: dict[str, Any] = {"max_position_embeddings": 131072}
STAND_INS: dict[str, tuple[str, dict[str, Any]]] = {
    "hmellor/tiny-random-LlamaForCausalLM": ("llama3", {"max_position_embeddings": 2048}),
    "meta-llama/Llama-3.2-1B": ("llama3", _LLAMA),
    "meta-llama/Llama-3.2-1B-Instruct": ("llama3", _LLAMA),
    "meta-llama/llama-2-7b-hf": ("llama3", {"max_position_embeddings": 4096}),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": ("llama3", {"max_position_embeddings": 2048}),
    "JackFram/llama-160m": ("llama3", {"max_position_embeddings": 2048}),
    "JackFram/llama-68m": ("llama3", {"max_position_embeddings": 2048}),
    "HuggingFaceTB/SmolLM2-135M-Instruct": ("llama3", {"max_position_embeddings": 8192}),
    "facebook/opt-125m": ("llama3", {"max_position_embeddings": 2048}),
    "distilbert/distilgpt2": ("llama3", {"max_position_embeddings": 1024}),
    "openai-community/gpt2": ("llama3", {"max_position_embeddings": 1024}),
    "HuggingFaceH4/zephyr-7b-beta": ("mistral", {"max_position_embeddings": 32768}),
    "Qwen/Qwen3-0.6B": ("qwen3", {"max_position_embeddings": 40960}),
    "Qwen/Qwen3-1.7B": ("qwen3", {"max_position_embeddings": 40960}),
    "Qwen/Qwen2.5-1.5B-Instruct": ("qwen2", {"max_position_embeddings": 32768}),
    "Qwen/Qwen2-1.5B-Instruct": ("qwen2", {"max_position_embeddings": 32768}),
    "google/gemma-3-1b-it": ("gemma3", {"max_position_embeddings": 32768}),
}


# Other weights than those of seed 0. Upstream's test of `bad_words` forbids what the model says first, and looks for it
# with and without a space before it. vLLM bars the form with the space only if it is as many tokens as the one without
# (SamplingParams.update_from_tokenizer); what seed 0 says is not, under transformers' forward and vLLM's rule alone.
SEEDS = {"hmellor/tiny-random-LlamaForCausalLM": 3}


def build(home: Path, text: list[Path]) -> None:
    """Fill `home`, to be used as HF_HOME, with every stand-in; files that are there stay.

    Args:
        home: the directory.
        text: files whose text the tokenizer is trained on, so that the prompts of the tests become few tokens.
    """
    tokenizer = home / f"tokenizer-{VOCAB_SIZE}"
    if not (tokenizer / "tokenizer.json").exists():
        tokenizer.mkdir(parents=True, exist_ok=True)
        train_tokenizer(tokenizer, text)
    for name, (kind, fields) in STAND_INS.items():
        repository = home / "hub" / f"models--{name.replace('/', '--')}"
        seed = SEEDS.get(name, 0)
        revision = hashlib.sha1(json.dumps([kind, fields, seed, VOCAB_SIZE]).encode()).hexdigest()
        snapshot, head = repository / "snapshots" / revision, repository / "refs" / "main"
        if head.exists() and head.read_text() == revision:
            continue
        ids = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
        overrides = {"vocab_size": VOCAB_SIZE, **ids, **fields}
        source = tiny.build(kind, seed=seed, overrides=overrides, cache=home / "tiny")
        shutil.rmtree(repository, ignore_errors=True)
        shutil.copytree(source, snapshot)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tokenizer / file, snapshot / file)
        (repository / "refs").mkdir()
        head.write_text(revision)


def train_tokenizer(directory: Path, text: list[Path]) -> None:
    """Write a byte-level BPE tokenizer without a token at the start, as GPT-2's and Qwen's are."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((path.read_text(errors="ignore") for path in sorted(text)), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    store.write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 131072,
            "chat_template": _CHATML,
        },
    )
    size = len(json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"])
    if size != VOCAB_SIZE:
        raise AssertionError(f"the tokenizer has {size} entries, not {VOCAB_SIZE}: give it more text")
