"""The byte-level tokenizer of the tiny checkpoints: every text encodes, every id decodes, BOS comes first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAD_ID, EOS_ID, BOS_ID, UNK_ID = 0, 1, 2, 3
_SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
# Pairs merged into one token, so that the number of tokens is not the number of bytes. "Ġ" is a space.
_MERGED_TEXT = (
    "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me de hi ri ro ic "
    "ne ea ra ce li ch ll be ma si om ur Ġt Ġa Ġs Ġw Ġo Ġc Ġb Ġf Ġm Ġp"
)
_MERGES = _MERGED_TEXT.split()
VOCAB_SIZE = len(_SPECIAL) + 256 + len(_MERGES)
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `directory`."""
    (directory / "tokenizer.json").write_text(json.dumps(_tokenizer(), ensure_ascii=False, indent=1) + "\n")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": _CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _tokenizer() -> dict[str, Any]:
    alphabet = _byte_alphabet()
    vocab = {token: index for index, token in enumerate([*_SPECIAL, *alphabet, *_MERGES])}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, token in enumerate(_SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [
                {"SpecialToken": {"id": "<bos>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "<bos>", "type_id": 1}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [BOS_ID], "tokens": ["<bos>"]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [[pair[0], pair[1]] for pair in _MERGES],
        },
    }


def _byte_alphabet() -> list[str]:
    """Return the printable character that byte-level BPE writes for each of the 256 bytes, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, spare = [], 256
    for byte in range(256):
        if byte in printable:
            table.append(chr(byte))
        else:
            table.append(chr(spare))
            spare += 1
    return table
