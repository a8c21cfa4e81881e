"""The training face computed as a server computes it: one token at a time, through pages, with the same operators.

A product of matrices sums in an order that depends on how many rows there are, so a forward over a whole sequence and a
forward over one new token round differently. Where both sides go row by row through the same operators on the same
shapes (queries, keys and values in one product, as a server packs them) there is nothing left to differ, and every
operation here has its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pilotage.core.environment import environment
from pilotage.core.errors import Unsupported
from pilotage.models.common.paging import build_metadata
from pilotage.nn.packing import joined

# What the engine is given so that it does the same; see `launch.engine`.
ENGINE: dict[str, Any] = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "additional_config": {"num_batched_tokens_buckets": [1], "num_seqs_buckets": [1]},
}

_CACHE_LINE = 64  # bytes; torch's own allocations begin at a multiple


@contextmanager
def definitions() -> Iterator[None]:
    """Run every operator's definition inside the block: faster kernels have no gradient."""
    with environment({"PILOTAGE_DISABLE_KERNELS": "1"}):
        yield


def one_row_logits(model: Any, tokens: Sequence[int], *, max_tokens: int, block_size: int) -> Tensor:
    """Compute the logits after each token, with gradients if they are enabled.

    Args:
        model: a training face of this project (`pilotage.models.<name>.hf`).
        tokens: of one sequence.
        max_tokens: longest sequence that the server takes; its block table has a column for each of its pages.
        block_size: slots in a page of the server.

    Returns:
        [len(tokens), V] in the model's dtype.

    Raises:
        Unsupported: the model is not one of this project's.
    """
    backbone = getattr(model, "model", None)
    layers: Any = getattr(backbone, "layers", ())
    if backbone is None or not all(hasattr(layer.self_attn, "layer_name") for layer in layers):
        raise Unsupported(
            f"{type(model).__module__} has no layers that read pages", where="exact", do="use the training face"
        )
    _align(model)
    attention = [layer.self_attn for layer in layers]
    columns = -(-max_tokens // block_size)
    # Page 0 is where padding would be written; a server hands it out to nobody.
    table = torch.arange(1, columns + 1, dtype=torch.int32)[None]
    weight = backbone.embed_tokens.weight
    for layer in attention:
        shape = (columns + 1, layer.num_kv_heads, block_size, layer.head_size)
        layer.kv_cache = tuple(torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in range(2))
    rows = []
    try:
        for position, token in enumerate(tokens):
            context = build_metadata(
                [layer.layer_name for layer in attention],
                num_computed=[position],
                num_new=[1],
                block_table=table,
                block_size=block_size,
                num_tokens=1,
                decode=True,
            )
            x = backbone.embed_tokens(torch.tensor([token], device=weight.device))
            with joined():
                rows.append(model.compute_logits(backbone(x, context["positions"], context)))
    finally:
        for layer in attention:
            del layer.kv_cache
    return torch.cat(rows)


def _align(model: Any) -> None:
    """Move parameters to addresses like a server's: products round otherwise where a weight lies across cache lines."""
    for parameter in model.parameters():
        if parameter.data_ptr() % _CACHE_LINE:
            parameter.data = parameter.data.clone()


def token_logprobs(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return log-probabilities [n - 1] of each token after those before it, row by row as a sampler computes them.

    Args:
        logits: [n or n - 1, V].
        tokens: n of them.

    Numerics: softmax in fp32, of fp64 logits in fp64.
    """
    following = torch.tensor(list(tokens[1:]), device=logits.device)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    rows = [logits[at : at + 1].log_softmax(-1, dtype=dtype) for at in range(len(following))]
    return torch.cat(rows).gather(1, following[:, None])[:, 0]
