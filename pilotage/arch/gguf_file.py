"""Read a Gemma 3 GGUF file: its weights under Hugging Face names, and its vocabulary as a byte-fallback BPE.

transformers has a GGUF loader too. It is not used: for Gemma it builds a unigram tokenizer out of the BPE ranks, which
splits text differently from the model's own tokenizer, and it holds the whole model in fp32.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pilotage.core.errors import BadInput

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_USER_DEFINED, _CONTROL, _BYTE = 4, 3, 6


def read(path: Path) -> Any:
    """Open `path`; the result goes to the other functions of this module.

    Raises:
        BadInput: not a GGUF file, or cut short.
    """
    import gguf

    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, OSError) as error:
        raise BadInput(f"not a whole GGUF file ({error})", where=str(path), do="fetch it again") from error


def metadata(reader: Any) -> dict[str, Any]:
    """Return the scalar metadata of the file (not the vocabulary)."""
    return {
        name: field.contents()
        for name, field in reader.fields.items()
        if name not in ("tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.token_type")
    }


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor of Gemma 3.

    Raises:
        BadInput: a tensor that Gemma 3 does not have.
    """
    if name in _NAMES:
        return _NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if not match or match[2] not in _NAMES:
        raise BadInput("a tensor that Gemma 3 does not have", where=name, do="use a Gemma 3 text GGUF file")
    return f"model.layers.{match[1]}.{_NAMES[match[2]]}.weight"


def tensors(reader: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, bf16 tensor) one at a time, in the order of the file.

    Numerics: dequantised to fp32, then rounded once to bf16. The file stores 1 + w for norms (its runtime has no
    offset); the 1 is taken off in fp32, where it is exact for weights that were bf16 before.
    """
    import gguf

    for tensor in reader.tensors:
        name = hf_name(tensor.name)
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if name.endswith("norm.weight"):
            values = values - np.float32(1.0)
        yield name, torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(torch.bfloat16)


def tokenizer_json(reader: Any) -> dict[str, Any]:
    """Return the contents of tokenizer.json for the file's vocabulary, with BOS added to every encoded text.

    The file holds tokens and ranks but no merges. Every way to split a token into two others is a merge, at the rank of
    the token; tokens that were user-defined (runs of spaces, tags) come first, because the original tokenizer cuts them
    out before it merges anything.
    """
    fields = reader.fields
    tokens: list[str] = fields["tokenizer.ggml.tokens"].contents()
    scores: list[float] = fields["tokenizer.ggml.scores"].contents()
    kinds: list[int] = fields["tokenizer.ggml.token_type"].contents()
    # The converter to GGUF wrote user-defined runs of spaces as spaces; inside the model's vocabulary a space is "▁".
    tokens = [
        token.replace(" ", "▁") if kind == _USER_DEFINED else token for token, kind in zip(tokens, kinds, strict=True)
    ]
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    bos = int(fields["tokenizer.ggml.bos_token_id"].contents())
    name = tokens[bos]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [
                {"SpecialToken": {"id": name, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": name, "type_id": 1}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {name: {"id": name, "ids": [bos], "tokens": [name]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": tokens[int(fields["tokenizer.ggml.unknown_token_id"].contents())],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": _merges(tokens, scores, kinds),
        },
    }


def _merges(tokens: list[str], scores: list[float], kinds: list[int]) -> list[list[str]]:
    # Control tokens and bytes are never the result or a part of a merge.
    mergeable = {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind not in (_CONTROL, _BYTE)
    }

    def rank(token: str) -> tuple[float, int]:
        index = mergeable[token]
        return (-float("inf") if kinds[index] == _USER_DEFINED else -scores[index], index)

    result = []
    for token in sorted(mergeable, key=rank):
        pairs = [
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in mergeable and token[cut:] in mergeable
        ]
        pairs.sort(key=lambda pair: (mergeable[pair[0]], mergeable[pair[1]]))
        result += [[left, right] for left, right in pairs]
    return result
