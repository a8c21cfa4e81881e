"""An EAGLE3 checkpoint to the draft head: its names, its vocabulary, its embedding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pilotage import weights
from pilotage.core.errors import BadInput, Unsupported, WeightError
from pilotage.models.eagle3.config import Eagle3Config
from pilotage.models.eagle3.model import Eagle3DraftHead
from pilotage.parallel import get_tp_group
from pilotage.weights import Drop, Identity, Rename, SafetensorsCheckpoint, WeightMap

_MIDDLE = ("midlayer", "layers.0")  # what published checkpoints call the layer


def weight_map(names: list[str]) -> WeightMap:
    """The WeightMap of a checkpoint with these tensors."""
    layer = next((name for name in _MIDDLE if any(other.startswith(f"{name}.") for other in names)), _MIDDLE[0])
    vocabulary = [Drop(name, "read as the vocabulary of the draft head", first=True) for name in ("d2t", "t2d")]
    return WeightMap([Rename(f"{layer}.{{*rest}}", "layer.{*rest}"), *vocabulary, Identity()])


def read_config(checkpoint: Path) -> Eagle3Config:
    """Read a checkpoint's config.json.

    Raises:
        BadInput: it cannot be read.
        Unsupported: see `Eagle3Config.from_json`.
    """
    path = checkpoint / "config.json"
    try:
        values: dict[str, Any] = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot be read ({error})", where=str(path), do="repair or replace the file") from error
    return Eagle3Config.from_json(values)


def load(checkpoint: Path, target: Any, *, dtype: torch.dtype, device: torch.device) -> Eagle3DraftHead:
    """Build the head for a served model and load it.

    Args:
        checkpoint: its directory.
        target: the served model, a `models.common.CausalLM` that hands out hidden states; told here which ones.
        dtype: of the head's weights.
        device: where they go.

    Raises:
        Unsupported: the served model hands out no hidden states, or has other widths.
        WeightError: the checkpoint does not fit.
    """
    config = read_config(checkpoint)
    hidden, vocab_size = target.config.hidden_size, target.config.vocab_size
    target.set_aux_hidden_state_layers(config.aux_layers or target.get_eagle3_default_aux_hidden_state_layers())
    source = SafetensorsCheckpoint(checkpoint)
    own = "embed_tokens.weight" in source
    if hidden != config.target_hidden_size or (not own and hidden != config.hidden_size):
        raise Unsupported(
            f"the head is for hidden states of {config.target_hidden_size} channels and has {config.hidden_size}, the "
            f"served model has {hidden}",
            where=str(checkpoint),
            do="use the head that was trained for this model",
        )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            head = Eagle3DraftHead(
                config, num_states=len(target.aux_hidden_state_layers), vocab_size=vocab_size, own_embedding=own
            )
    finally:
        torch.set_default_dtype(before)
    group = get_tp_group()
    rank, ranks = group.rank, group.world_size
    names = weight_map(source.keys())
    weights.load_into(head, checkpoint, names, rank=rank, world_size=ranks, device=device, dtype=dtype)
    head.pack()
    if not own:
        head.embed_tokens = target.model.embed_tokens
    head.target_ids = vocabulary(source, config.draft_vocab_size, vocab_size, where=str(checkpoint))
    if head.target_ids is not None:
        head.target_ids = head.target_ids.to(device)
    head.eval()
    head.requires_grad_(False)
    return head


def vocabulary(source: SafetensorsCheckpoint, draft_size: int, size: int, *, where: str) -> Tensor | None:
    """Return the served model's token of each token of the head; None where they are the same.

    Raises:
        WeightError: the mapping is missing, names a token twice or one that does not exist, or contradicts its inverse.
    """
    if "d2t" not in source:
        if draft_size != size:
            raise WeightError(f"{draft_size} draft tokens for a vocabulary of {size} without d2t", where=where)
        return None
    found = source["d2t"][...].long().flatten() + torch.arange(draft_size)
    if len(found.unique()) != draft_size or int(found.min()) < 0 or int(found.max()) >= size:
        raise WeightError(f"d2t does not name {draft_size} different tokens of {size}", where=where)
    if "t2d" in source:
        known = source["t2d"][...].bool().flatten().nonzero().flatten()
        if known.tolist() != sorted(found.tolist()):
            raise WeightError("t2d and d2t name different tokens", where=where, do="fetch the checkpoint again")
    return found
