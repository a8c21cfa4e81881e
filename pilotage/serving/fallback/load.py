"""From a checkpoint of any causal language model of transformers to a proven fallback."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pilotage.core.errors import Unsupported, WeightError
from pilotage.parallel import get_tp_group
from pilotage.serving.fallback.check import prove
from pilotage.serving.fallback.model import WRITE, FallbackForCausalLM, in_a_line, require_length

_LOG = logging.getLogger("vllm.pilotage")


def load(checkpoint: Path, *, dtype: torch.dtype, max_model_len: int, free_bytes: int = 0) -> FallbackForCausalLM:
    """Load a checkpoint and prove that it can be served on pages.

    Args:
        checkpoint: its directory.
        dtype: serving dtype.
        max_model_len: longest request.
        free_bytes: memory to spare for the proof, see `check.prove`.

    Returns:
        The model, with its `proof`.

    Raises:
        Unsupported: it cannot be served this way; says why.
        WeightError: the checkpoint lacks tensors of the model.
    """
    full = partial(_whole, checkpoint, dtype)
    if get_tp_group().world_size > 1:
        from pilotage.serving.fallback import sharded

        model = sharded.load(full, max_model_len=max_model_len, free_bytes=free_bytes)
        return _admitted(model, max_model_len)
    return serve(full(), max_model_len=max_model_len, free_bytes=free_bytes)


def _whole(checkpoint: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint,
            dtype=dtype,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
    except Exception as error:
        raise Unsupported(
            f"transformers does not load it ({in_a_line(error)})", where=str(checkpoint), do=WRITE
        ) from error
    hf, info = loaded
    stated = hf.config.architectures or []
    if stated and type(hf).__name__ not in stated:  # transformers goes by the type, vLLM by the architecture
        raise Unsupported(
            f"its config.json says architecture {', '.join(stated)} and model type {hf.config.model_type}, of which "
            f"transformers makes {type(hf).__name__}",
            where=str(checkpoint),
            do="correct config.json",
        )
    absent = sorted(map(str, info["missing_keys"] or ())) + sorted(map(str, info["mismatched_keys"] or ()))
    if absent:
        raise WeightError(
            f"{len(absent)} tensors of the model are missing or misshapen: {', '.join(absent[:5])}",
            where=str(checkpoint),
            do="repair the checkpoint",
        )
    hf.eval().requires_grad_(False)
    return hf


def serve(hf: Any, *, max_model_len: int, free_bytes: int = 0) -> FallbackForCausalLM:
    """Make a loaded model of transformers servable and prove it; see `load`."""
    hf.eval().requires_grad_(False)
    require_length(hf.config, max_model_len, type(hf).__name__)
    model = FallbackForCausalLM(hf)
    model.proof = prove(model, max_model_len=max_model_len, free_bytes=free_bytes)
    return _admitted(model, max_model_len)


def _admitted(model: FallbackForCausalLM, max_model_len: int) -> FallbackForCausalLM:
    """Refuse more positions than a proven model has, and say that it serves."""
    limit, proof = model.counting.limit, model.proof
    if limit is not None and max_model_len > limit:
        raise Unsupported(
            f"it has embeddings of {limit} positions, and max_model_len is {max_model_len}",
            where=model.name,
            do=f"serve it with max_model_len={limit} or less",
        )
    if model.counting.offset:
        _LOG.warning(
            "%s: positions count every token; Hugging Face's own forward leaves padding tokens out of the count",
            model.name,
        )
    _LOG.warning(
        "%s has no model package: served by the day-zero fallback on Hugging Face's modules, slow but right; its "
        "logits were compared with Hugging Face's own forward on %d rows in %s, worst relative difference %.2g",
        model.name,
        proof.rows,
        proof.dtype,
        max(proof.worst.values()),
    )
    return model
