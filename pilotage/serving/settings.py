"""The engine settings that smoke, validate and bench share.

Lengths, request counts and buckets are part of every compiled graph: three commands with the same settings compile
once, and the two that come later find everything in the compile cache.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pilotage.core.errors import BadInput

DTYPE = "bfloat16"
MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 8
# Few, because a graph costs seconds to compile on a CPU: a short prompt, four of them in one forward, a middling one, a
# long one; one request and a full batch.
TOKEN_BUCKETS = (32, 128, 256, 1024)
SEQ_BUCKETS = (1, 8)
# An engine in another dtype only computes what is compared with a reference; two graphs hold all of it.
COMPARING_TOKEN_BUCKETS = (1024,)
COMPARING_SEQ_BUCKETS = (8,)
# What configurations call their longest sequence; models without a package have names of their own.
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")


def shared(checkpoint: Path, dtype: str = DTYPE) -> dict[str, Any]:
    """Return the arguments of `launch.engine` and `launch.server` for a checkpoint.

    Args:
        checkpoint: its directory.
        dtype: serving dtype; one other than `DTYPE` gets fewer graphs.

    Raises:
        BadInput: it has no readable config.json.
    """
    longest = _max_position(checkpoint)
    length = MAX_MODEL_LEN if longest is None else min(MAX_MODEL_LEN, longest)
    serves = dtype == DTYPE
    token_buckets = TOKEN_BUCKETS if serves else COMPARING_TOKEN_BUCKETS
    return {
        "dtype": dtype,
        "max_model_len": length,
        "max_num_seqs": MAX_NUM_SEQS,
        "additional_config": {
            "num_batched_tokens_buckets": [size for size in token_buckets if size <= length] or [length],
            "num_seqs_buckets": list(SEQ_BUCKETS if serves else COMPARING_SEQ_BUCKETS),
        },
    }


def _max_position(checkpoint: Path) -> int | None:
    path = checkpoint / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot be read ({error})", where=str(path), do="repair or replace the file") from error
    nested = config.get("text_config")
    stated = nested if isinstance(nested, dict) else config
    return next((stated[key] for key in _LENGTHS if isinstance(stated.get(key), int)), None)
