"""The weight map of models that keep Hugging Face's names and layouts, or most of them."""

from __future__ import annotations

from pilotage.weights import Drop, Identity, Tie, WeightMap
from pilotage.weights.rules import Rule


def same_names(*others: Rule | Drop, tied: bool) -> WeightMap:
    """Map every tensor to the parameter of its own name.

    Args:
        others: rules for the tensors that are named or laid out differently.
        tied: the head has no tensor of its own and is loaded from the embedding's.
    """
    head = [Tie("lm_head.weight", "model.embed_tokens.weight")] if tied else []
    drop = Drop("model.layers.{i}.self_attn.rotary_emb.inv_freq", "computed from the config")
    return WeightMap([*head, drop, *others, Identity()])
